"""What a request has produced so far, over all of its attempts."""

from __future__ import annotations

import time
from collections.abc import Callable

from baton.core.errors import DeadlineError
from baton.core.request import FinishReason
from baton.core.request_ids import new_call_id
from baton.core.timeline import DraftCounts, Event
from baton.core.timers import is_over
from baton.core.urgency import Urgency
from baton.rpc.conversions import unpack_finish_reason, unpack_logprobs
from baton.rpc.wire import worker_pb2
from cluster.registry.workers import Worker
from cluster.requests.booking import Booking
from cluster.requests.generation import GenerationRequest, TokenChunk


class Journal:
    """Tokens that the client has, and what the next attempt must know of those before it.

    Args:
        timeout_s: for all attempts together.
        clock: monotonic seconds.
    """

    def __init__(
        self, request: GenerationRequest, timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.request = request
        self.token_ids: list[int] = []
        self.num_cached_tokens = 0
        self.num_drafted = 0
        self.num_accepted = 0
        self.drafts: dict[str, DraftCounts] = {}
        """By speculation method, as far as workers tell."""
        self.attempt = 0
        self.failed_on: set[str] = set()
        """Ids of the workers that attempts failed on."""
        self.accused: list[Worker] = []
        """Workers that failed at this request for no stated reason. Whether the request is at fault is not known until
        another worker has served it."""
        self.num_internal_errors = 0
        self.booking: Booking | None = None
        """Of the last attempt."""
        self.finish_reason: FinishReason | None = None
        received_s = request.timeline.events.get(Event.RECEIVED, clock())
        self.received_s = received_s
        self.urgency = Urgency(request.slo.priority, received_s + request.slo.ttft_s, request.slo.ttft_s)
        """Its place among other requests that wait, here and on workers."""
        self._timeout_s = timeout_s
        self._clock = clock
        self._deadline_s = clock() + timeout_s

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def time_left_s(self) -> float:
        """Raises :class:`DeadlineError` when there is none."""
        left = self._deadline_s - self._clock()
        if is_over(left):
            raise self.deadline_error()
        return left

    def deadline_error(self) -> DeadlineError:
        return DeadlineError(
            f"The request was not finished within {self._timeout_s:g} s. Ask for fewer tokens, try again when the "
            "cluster is less busy, or raise router.request_timeout_s."
        )

    def new_call_id(self) -> str:
        """The request's name on the workers of one attempt."""
        return new_call_id(self.request.request_id)

    def take(self, batch: worker_pb2.TokenBatch) -> TokenChunk:
        """Writes a worker's tokens down; gives them as the client gets them."""
        token_ids, num_drafted, num_accepted = tuple(batch.token_ids), batch.num_drafted, batch.num_accepted
        self.token_ids.extend(token_ids)
        self.finish_reason = unpack_finish_reason(batch)
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        if num_drafted and (method := batch.drafted_by):
            counts = self.drafts.setdefault(method, DraftCounts())
            counts.num_drafted += num_drafted
            counts.num_accepted += num_accepted
        return TokenChunk(
            token_ids, unpack_logprobs(batch), self.finish_reason, self.num_cached_tokens, num_drafted, num_accepted
        )
