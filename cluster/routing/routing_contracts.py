"""The routing contracts. Policies see snapshots, never workers, and so run against simulations as well.

A *route* is the way of one request: a prefill worker and a decode worker, chosen together, or a decode worker alone
that computes the prompt itself (local prefill). Filters look at the workers of a pool, scorers and pickers at routes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from baton.core.queue_priority import NO_PRIORITY, QueuePriority
from baton.core.slo import STANDARD, SloClass
from cluster.latency.estimates import EMPTY_QUEUE, UNKNOWN_FORECAST, PromptQueue, RouteForecast

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.intp]
Bools = npt.NDArray[np.bool_]

LOCAL = -1
"""In place of a prefill worker's index."""


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """A worker as the router knows it at one moment, in view of one request.

    Attributes:
        accepting: healthy, and not about to leave.
        in_flight: requests assigned to it that are not over.
        assigned: requests ever assigned to it.
        queue: prompts that it would compute before this request's.
        batch: sequences that decode there or will.
        context_tokens: of these sequences together, at present.
        final_tokens: the same in the end, as far as answers have their usual lengths.
        cached_tokens: of this request's prompt, as far as the worker's prefix cache holds it.
        kv_tokens: size of its KV cache; 0 when that is not known.
        max_num_seqs: sequences that one of its steps may have.
        kv_bytes_per_token: that a hand-off from or to it moves.
        device, node: workers of one node and the device ``cpu`` compute on the same processor.
        backlog_tokens: uncached tokens of all prompts that it has still to compute, in whatever order.
        tpot_target_s: the strictest target among the sequences that decode there.
        last_assigned_s: when it last got a request, on the router's clock.
    """

    worker_id: str
    pool: str
    accepting: bool
    in_flight: int
    assigned: int
    queue: PromptQueue = EMPTY_QUEUE
    batch: int = 0
    context_tokens: int = 0
    final_tokens: int = 0
    cached_tokens: int = 0
    kv_tokens: int = 0
    max_num_seqs: int = 64
    chunk_tokens: int = 512
    kv_bytes_per_token: int = 0
    device: str = ""
    node: str = ""
    backlog_tokens: int = 0
    tpot_target_s: float = inf
    last_assigned_s: float = -inf

    def has_capacity(self, num_tokens: float) -> bool:
        """Whether its steps have a place for one more sequence, and its KV cache room for so many more tokens when all
        sequences that are there have come to their ends as well.

        With less room some would soon be preempted, and later requests would wait behind them.
        """
        has_kv = not self.kv_tokens or max(self.context_tokens, self.final_tokens) + num_tokens <= self.kv_tokens
        return has_kv and self.batch < self.max_num_seqs


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """A request as policies see it.

    Attributes:
        num_prompt_tokens: tokens to compute before the next one; those that a lost worker had generated are among them.
        failed_on: workers on which an attempt of this request has failed.
        slo: what the request was promised.
        max_tokens: the most that it may generate.
        output_tokens: that it is expected to generate.
        elapsed_ms: since its receipt.
        queue_priority: its place among others that wait.
        is_resumed: the client has tokens already, so that a decode worker must go on alone.
    """

    request_id: str
    num_prompt_tokens: int
    failed_on: frozenset[str] = frozenset()
    slo: SloClass = STANDARD
    max_tokens: int = 1
    elapsed_ms: float = 0.0
    queue_priority: QueuePriority = NO_PRIORITY
    is_resumed: bool = False
    output_tokens: float = 1.0

    @property
    def num_tokens(self) -> float:
        """Expected tokens in its KV cache at its end."""
        return self.num_prompt_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class Route:
    """
    Attributes:
        prefill: ``None`` if the decode worker computes the prompt itself.
    """

    prefill: WorkerSnapshot | None
    decode: WorkerSnapshot


@dataclass(frozen=True, slots=True)
class RouteDecision:
    """The route chosen for a request, and what is expected of it.

    Attributes:
        cached_tokens: of the prompt, on the worker that computes it.
        ttft_ms: predicted, from the receipt of the request.
        tpot_ms: predicted mean time per output token.
        idle_ttft_ms, idle_tpot_ms: what the best route would take if nothing else ran: no load can be blamed for it.
        wait_ms: of ``ttft_ms``, behind prompts of others.
        has_capacity: the decode worker could take it at once.
        record: JSON-ready, for the timeline: the candidates with scores and predictions.
        forecast: what the latency model needs to learn from the outcome.
    """

    prefill_id: str | None
    decode_id: str
    cached_tokens: int
    ttft_ms: float
    tpot_ms: float
    idle_ttft_ms: float = 0.0
    idle_tpot_ms: float = 0.0
    wait_ms: float = 0.0
    has_capacity: bool = True
    record: Mapping[str, Any] = field(default_factory=dict)
    forecast: RouteForecast = UNKNOWN_FORECAST


@dataclass(frozen=True, slots=True, eq=False)
class RouteForecasts:
    """The predictions for each route: arrays ``[num_routes]``, milliseconds.

    Attributes:
        ttft_ms: from the receipt of the request.
        ttft_sd_ms, tpot_sd_ms: standard deviation of a single outcome.
        wait_ms: of the TTFT, behind prompts of others.
        tpot_ms: mean time per output token of the request, hand-off included.
        neighbour_tpot_ms: of the sequences that decode on the same worker, with the request among them; 0 without any.
        disturbance_ms: by which computing the prompt there delays these sequences, summed over them.
        transfer_ms: between first token and decoding.
        exposed_ms: of that, what the transfer takes that computing the prompt does not hide.
        idle_ttft_ms, idle_tpot_ms: if nothing else ran.
        ttft_factor, tpot_factor: calibration, which is contained in the predictions.
        contended: the two workers would compute on the same processor at the same time.
        before_ms: of every TTFT, what is over already and the way there and back.
    """

    ttft_ms: Floats
    ttft_sd_ms: Floats
    wait_ms: Floats
    tpot_ms: Floats
    tpot_sd_ms: Floats
    neighbour_tpot_ms: Floats
    disturbance_ms: Floats
    transfer_ms: Floats
    exposed_ms: Floats
    idle_ttft_ms: Floats
    idle_tpot_ms: Floats
    ttft_factor: Floats
    tpot_factor: Floats
    contended: Bools
    before_ms: float


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Routes of one request. Nobody changes the arrays.

    Attributes:
        prefill_workers, decode_workers: that passed the filters.
        prefill: ``[num_routes]`` indices into ``prefill_workers``; :data:`LOCAL` where the decode worker computes the
            prompt itself.
        decode: ``[num_routes]`` indices into ``decode_workers``.
    """

    request: RoutingRequest
    prefill_workers: Sequence[WorkerSnapshot]
    decode_workers: Sequence[WorkerSnapshot]
    prefill: Ints
    decode: Ints
    forecasts: RouteForecasts

    def __len__(self) -> int:
        return len(self.decode)

    @property
    def is_local(self) -> Bools:
        """``[num_routes]``"""
        return np.asarray(self.prefill == LOCAL)

    def route(self, index: int) -> Route:
        prefill = int(self.prefill[index])
        return Route(
            None if prefill == LOCAL else self.prefill_workers[prefill], self.decode_workers[int(self.decode[index])]
        )

    def by_prefill(self, values: Sequence[float], local: float = 0.0) -> Floats:
        """``[num_routes]`` from one value for each prefill worker; ``local`` for routes without one."""
        return np.array([*values, local])[self.prefill]

    def by_decode(self, values: Sequence[float]) -> Floats:
        """``[num_routes]`` from one value for each decode worker."""
        return np.array(values, dtype=np.float64)[self.decode]

    def by_computing(self, prefill: Sequence[float], decode: Sequence[float]) -> Floats:
        """``[num_routes]``: of the worker that computes the prompt."""
        return np.where(self.is_local, self.by_decode(decode), self.by_prefill(prefill))


Preference = Callable[[Candidates], Bools]
"""``[num_routes]``: routes that go before all others, whatever their scores."""


class Filter(Protocol):
    def filter(self, workers: Sequence[WorkerSnapshot], request: RoutingRequest) -> list[WorkerSnapshot]:
        """Those of one pool that may serve the request, in the same order."""
        ...


class Scorer(Protocol):
    def score(self, candidates: Candidates) -> Floats:
        """``[num_routes]`` in [0, 1]; 1 is best. There is at least one route."""
        ...


class Picker(Protocol):
    needs_scores: bool
    """Without need, scorers are not run."""

    def pick(self, candidates: Candidates, scores: Floats, among: Ints) -> int:
        """Index of one of the routes.

        Args:
            scores: ``[num_routes]``, weighted sums.
            among: indices of the routes to pick from, at least one, rising.
        """
        ...


class RouteChooser(Protocol):
    """Filters, scorers and a picker, put together."""

    def choose(
        self,
        prefill: Sequence[WorkerSnapshot],
        decode: Sequence[WorkerSnapshot],
        request: RoutingRequest,
        preferred: Preference | None = None,
    ) -> RouteDecision | None:
        """The best route at present; None when no worker that is needed may take the request.

        Args:
            preferred: routes that go before all others; ``None`` if only scores count.
        """
        ...
