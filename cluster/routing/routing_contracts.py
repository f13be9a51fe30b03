"""The routing contracts. Policies see snapshots instead of workers, so they also run against simulations.

A *route* is the set of workers for one request: a prefill worker and a decode worker, chosen together, or a decode
worker alone that computes the prompt itself (local prefill). Filters take the workers of a pool, scorers and pickers
take routes.
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
"""Index of the prefill worker in local routes."""


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """The router's view of a worker at one moment, for one request.

    Attributes:
        accepting: healthy, and not about to leave.
        in_flight: requests assigned to it that have not ended.
        assigned: requests ever assigned to it.
        queue: prompts that it would compute before this request's prompt.
        batch: sequences that decode there or will do so.
        context_tokens: present tokens of these sequences together.
        final_tokens: expected tokens of these sequences together at their ends, for answers of the usual length.
        cached_tokens: tokens of this request's prompt that the worker's prefix cache holds.
        kv_tokens: size of its KV cache in tokens; 0 if unknown.
        max_num_seqs: largest number of sequences in one step.
        chunk_tokens: token budget of one step.
        kv_bytes_per_token: KV bytes per token of a hand-off from or to it.
        device, node: workers of one node and the device ``cpu`` compute on the same processor.
        backlog_tokens: uncached tokens of all prompts that it still has to compute.
        tpot_target_s: the strictest TPOT target of the sequences that decode there.
        last_assigned_s: time of its last assigned request, on the router's clock.
        layout: fingerprint of its KV layout. During an upgrade there are two; only workers with equal ones form a pair.
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
    layout: str = ""

    def has_capacity(self, num_tokens: float) -> bool:
        """Whether it has a seat and KV blocks for one more sequence of ``num_tokens``."""
        return self.has_kv(num_tokens) and self.has_seat

    @property
    def has_seat(self) -> bool:
        """Whether its batch has a place for one more sequence."""
        return self.batch < self.max_num_seqs

    def has_kv(self, num_tokens: float) -> bool:
        """Whether its KV cache has room for ``num_tokens`` beyond the expected final tokens of all sequences on it.

        With less room some sequences would soon be preempted, and later requests would wait behind them.
        """
        return not self.kv_tokens or max(self.context_tokens, self.final_tokens) + num_tokens <= self.kv_tokens


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """The policies' view of a request.

    Attributes:
        num_prompt_tokens: tokens to compute before the next one, including those that earlier attempts generated.
        failed_on: workers on which an attempt of this request has failed.
        slo: its SLO class.
        max_tokens: limit of the tokens it may generate.
        output_tokens: expected number of generated tokens.
        elapsed_ms: time since its receipt.
        queue_priority: its place among waiting requests.
        is_resumed: the client has tokens already, so a decode worker must continue alone.
        layout: the KV layout, and thus the model, of these tokens; another model must not continue them.
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
    layout: str = ""

    @property
    def num_tokens(self) -> float:
        """Expected tokens in its KV cache at its end."""
        return self.num_prompt_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class Route:
    """The workers of a request.

    Attributes:
        prefill: ``None`` if the decode worker computes the prompt itself.
    """

    prefill: WorkerSnapshot | None
    decode: WorkerSnapshot


@dataclass(frozen=True, slots=True)
class RouteDecision:
    """The route chosen for a request, and the predictions for it.

    Attributes:
        cached_tokens: prompt tokens cached on the worker that computes the prompt.
        ttft_ms: predicted TTFT, from the receipt of the request.
        tpot_ms: predicted mean time per output token.
        idle_ttft_ms, idle_tpot_ms: predictions for the best route if nothing else ran.
        wait_ms: the part of ``ttft_ms`` spent waiting for other prompts.
        has_capacity: the decode worker has a place and KV blocks for it.
        record: the candidates with scores and predictions for the timeline; JSON-ready.
        forecast: the prediction from which the latency model learns when the outcome is known.
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
        ttft_ms: TTFT from the receipt of the request.
        ttft_sd_ms, tpot_sd_ms: standard deviation of a single outcome.
        wait_ms: the part of the TTFT spent waiting for other prompts.
        tpot_ms: mean time per output token of the request, hand-off included.
        neighbour_tpot_ms: TPOT of the sequences that decode on the same worker, with the request added; 0 if none do.
        disturbance_ms: delay of these sequences by computing the prompt there, summed over them.
        transfer_ms: time between first token and decoding.
        exposed_ms: the part of the KV transfer that does not overlap with computing the prompt.
        idle_ttft_ms, idle_tpot_ms: predictions if nothing else ran.
        ttft_factor, tpot_factor: calibration factors, which the predictions include.
        contended: the two workers would compute on the same processor at the same time.
        before_ms: the part of every TTFT for the elapsed time and the delivery to and from the worker.
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
    """Routes of one request. The arrays must not be changed.

    Attributes:
        prefill_workers, decode_workers: the workers that passed the filters.
        prefill: ``[num_routes]`` indices into ``prefill_workers``; :data:`LOCAL` for local prefill.
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
        """``[num_routes]``: whether the route is local."""
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
        """``[num_routes]``: the value of the worker that computes the prompt."""
        return np.where(self.is_local, self.by_decode(decode), self.by_prefill(prefill))


Preference = Callable[[Candidates], Mapping[str, Bools]]
"""Returns ``[num_routes]`` by the name of a limit: whether a route keeps it. Routes that keep all limits take
precedence over the others, regardless of scores."""


class Filter(Protocol):
    def filter(self, workers: Sequence[WorkerSnapshot], request: RoutingRequest) -> list[WorkerSnapshot]:
        """The workers of one pool that may serve the request, in the same order."""
        ...


class Scorer(Protocol):
    def score(self, candidates: Candidates) -> Floats:
        """``[num_routes]`` in [0, 1]; 1 is best. There is at least one route."""
        ...


class Picker(Protocol):
    needs_scores: bool
    """False skips the scorers."""

    def pick(self, candidates: Candidates, scores: Floats, among: Ints) -> int:
        """Picks the index of one of the routes.

        Args:
            scores: ``[num_routes]``, weighted sums.
            among: indices of the routes to pick from, at least one, in ascending order.
        """
        ...


class RouteChooser(Protocol):
    """Chooses a route with filters, scorers and a picker."""

    def choose(
        self,
        prefill: Sequence[WorkerSnapshot],
        decode: Sequence[WorkerSnapshot],
        request: RoutingRequest,
        preferred: Preference | None = None,
    ) -> RouteDecision | None:
        """The best route at present; ``None`` if a pool has no worker for the request.

        Args:
            preferred: marks routes that take precedence over all others; ``None`` if only scores count.
        """
        ...
