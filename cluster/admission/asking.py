"""A sequence that asks for a route."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from baton.core.slo import SloClass
from baton.core.urgency import Urgency
from cluster.admission.waiting_line import Ticket
from cluster.requests.request_record import RequestRecord

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Asking(Generic[T]):
    """
    Attributes:
        asked_s, received_s: when it came here, and to this machine; seconds of the router's clock.
        future: gets the placement or the error, if it has to wait; None: there is no route, and it asks again.
        ticket: its place in the queue, if it has or had one.
        was_held: for company. Once is enough.
        is_lost: it waits among those whose target for the first token cannot be kept.
    """

    record: RequestRecord
    urgency: Urgency
    asked_s: float
    received_s: float
    future: asyncio.Future[T | None] | None = None
    ticket: Ticket[Any] | None = None
    was_held: bool = False
    is_lost: bool = False

    @property
    def slo(self) -> SloClass:
        return self.record.request.slo

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.record.request.prompt_token_ids)

    @property
    def is_gone(self) -> bool:
        """Its client left, and the task that waits has not heard of it yet."""
        return self.future is not None and self.future.done()

    def step_back(self, now_s: float) -> None:
        """Its target is lost: on workers it goes behind those of its class, and its lateness counts from now on only.

        Or else it would at once count as more urgent than others, who were let in to be in time.
        """
        ttft_s = self.slo.ttft_s
        self.record.urgency = Urgency(self.slo.priority - 1, now_s + ttft_s, ttft_s)

    def answer(self) -> asyncio.Future[T | None]:
        """What the one who waits awaits."""
        if self.future is None:
            self.future = asyncio.get_running_loop().create_future()
        return self.future

    def give(self, placement: T) -> None:
        """Ends the wait, of one that is not gone."""
        self.answer().set_result(placement)

    def ask_again(self) -> None:
        """Ends the wait for room, of one that is not gone: there is no route, and one has to be waited for."""
        self.answer().set_result(None)

    def fail(self, error: Exception) -> None:
        """Ends the wait with an error, if it is not over."""
        if not self.answer().done():
            self.answer().set_exception(error)

    def placement(self) -> T | None:
        """What it was given, if it was."""
        future = self.future
        given = future is not None and future.done() and not future.cancelled() and future.exception() is None
        return future.result() if given and future is not None else None
