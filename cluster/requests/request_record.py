"""The router's record of a request, from its arrival to its end. Only the router changes its state."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from baton.core.errors import DeadlineError
from baton.core.queue_priority import QueuePriority
from baton.core.request import FinishReason
from baton.core.request_ids import new_call_id
from baton.core.timeline import DraftCounts, Event, Timeline
from baton.core.timers import has_expired
from baton.rpc.conversions import unpack_finish_reason, unpack_logprobs
from baton.rpc.rounds import unpack_round
from baton.rpc.wire import worker_pb2
from cluster.latency.estimates import RouteForecast
from cluster.registry.workers import Worker
from cluster.requests.generation import GenerationRequest, TokenChunk


class RequestState(StrEnum):
    """The state of a request in its life."""

    ARRIVED = "arrived"
    """The router has just received it."""
    QUEUED = "queued"
    """The request waits for workers, for its first attempt or for the next one."""
    PLACED = "placed"
    """The request has workers, which have not sent a token in this attempt."""
    STREAMING = "streaming"
    """The request's workers send tokens."""
    ENDED = "ended"


_NEXT: Mapping[RequestState, frozenset[RequestState]] = {
    RequestState.ARRIVED: frozenset({RequestState.QUEUED, RequestState.ENDED}),
    RequestState.QUEUED: frozenset({RequestState.PLACED, RequestState.ENDED}),
    RequestState.PLACED: frozenset({RequestState.STREAMING, RequestState.QUEUED, RequestState.ENDED}),
    RequestState.STREAMING: frozenset({RequestState.QUEUED, RequestState.ENDED}),
    RequestState.ENDED: frozenset(),
}
"""Every allowed change of state. A failed attempt leads back to ``QUEUED``."""


@dataclass(slots=True, eq=False)
class Booking:
    """The work that one attempt adds to its workers, and what was predicted for it.

    Attributes:
        name: the name of its entries in the :class:`~cluster.latency.ledger.WorkLedger`.
        prefill_id: empty if the decode worker computes the prompt.
        uncached_tokens: tokens of the prompt that are computed.
        cached_tokens: those before them.
        expected_tokens: number of tokens that the sequence is expected to get.
        router_id: the router, if there are several.
        decodes: False if the prefill worker of a pair generates the only token.
        is_computed: the prompt is computed; the first token has arrived.
    """

    name: str
    prefill_id: str
    decode_id: str
    forecast: RouteForecast
    uncached_tokens: int = 0
    cached_tokens: int = 0
    expected_tokens: int = 0
    router_id: str = ""
    decodes: bool = True
    is_computed: bool = False

    @property
    def computing_id(self) -> str:
        """The worker that computes the prompt."""
        return self.prefill_id or self.decode_id


class RequestRecord:
    """One sequence over all of its attempts: its state, its tokens, and the facts that the next attempt needs.

    Tokens that the client already has stay in ``token_ids``. If an attempt fails, the next one continues after them.

    Args:
        timeout_s: time limit for all attempts together.
        clock: monotonic seconds.

    Attributes:
        attempt: number of the current attempt, from 1; 0 before the first one.
        drafts: drafted and accepted tokens by speculation method, as reported by workers.
        failed_on: ids of the workers on which attempts failed.
        accused: workers that failed at this request for no stated reason. The request itself may be the cause until
            another worker has served it.
        booking: the booking of the last attempt.
        layout: KV layout of the workers that generated its tokens.
        queue_priority: its place among waiting requests, in the router and on workers.
        outcome: how it ended: a finish reason, ``cancelled``, ``rejected``, or an error code; ``None`` until then.
        was_accepted: False if ``router.max_inflight`` turned it away on arrival.
        last_tokens_s, previous_tokens_s: arrival times of the last two batches of tokens; ``None`` before they arrive.
    """

    def __init__(
        self, request: GenerationRequest, timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.request = request
        self.state = RequestState.ARRIVED
        self.token_ids: list[int] = []
        self.num_cached_tokens = 0
        self.num_drafted = 0
        self.num_accepted = 0
        self.drafts: dict[str, DraftCounts] = {}
        self.attempt = 0
        self.failed_on: set[str] = set()
        self.accused: list[Worker] = []
        self.num_internal_errors = 0
        self.booking: Booking | None = None
        self.layout = ""
        self.finish_reason: FinishReason | None = None
        self.outcome: str | None = None
        self.was_accepted = False
        self.last_tokens_s: float | None = None
        self.previous_tokens_s: float | None = None
        self.received_s = request.timeline.events.get(Event.RECEIVED, clock())
        slo = request.slo
        self.queue_priority = QueuePriority(slo.priority, self.received_s + slo.ttft_s, slo.ttft_s)
        self._timeout_s = timeout_s
        self._clock = clock
        self._deadline_s = clock() + timeout_s

    @property
    def timeline(self) -> Timeline:
        return self.request.timeline

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def was_local(self) -> bool:
        """The decode worker computed the prompt, or no prefill worker was ever asked."""
        return "prefill_worker" not in self.timeline.attributes

    @property
    def time_left_s(self) -> float:
        """Seconds until the deadline. Raises :class:`DeadlineError` after it."""
        left = self._deadline_s - self._clock()
        if has_expired(left):
            raise self.deadline_error()
        return left

    def change_state(self, state: RequestState) -> None:
        """Raises :class:`RuntimeError` if the present state does not allow the change."""
        if state not in _NEXT[self.state]:
            raise RuntimeError(f"request {self.request.request_id} cannot go from {self.state} to {state}")
        self.state = state

    def note_tokens(self, now_s: float) -> None:
        """Records the arrival time of tokens."""
        self.previous_tokens_s, self.last_tokens_s = self.last_tokens_s, now_s

    def deadline_error(self) -> DeadlineError:
        return DeadlineError(
            f"The request did not finish within {self._timeout_s:g} s. Ask for fewer tokens, try again when the "
            "cluster is less busy, or raise router.request_timeout_s."
        )

    def new_call_id(self) -> str:
        """A new name for the request on the workers of one attempt."""
        return new_call_id(self.request.request_id)

    def take(self, batch: worker_pb2.TokenBatch, vocab_size: int) -> TokenChunk:
        """Adds a worker's tokens. Returns the chunk for the client.

        Args:
            vocab_size: upper bound of drafted token ids.

        Raises:
            InternalError: the request is traced, and the tokens have no round or a damaged one.
        """
        found = unpack_round(batch, vocab_size) if self.request.is_traced else None
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
            token_ids,
            unpack_logprobs(batch),
            self.finish_reason,
            self.num_cached_tokens,
            num_drafted,
            num_accepted,
            round=found,
        )
