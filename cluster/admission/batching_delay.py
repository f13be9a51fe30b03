"""Batching delay: how long a prompt waits for others to share its step. Times are milliseconds.

A step costs ``fixed``, plus ``own`` for each prompt. Let the next prompt come ``gap`` later. One after the other, the
first takes fixed + own and the second 2·(fixed + own) - gap. Together, the first takes gap + fixed + 2·own and the
second fixed + 2·own. The sum of the two is smaller together if

    fixed - own > 2·gap

so short prompts gain on devices with a high fixed cost, if others come fast. Where throughput comes first, a prompt is
also held if that only saves a step: together they take `fixed` less of the worker's time. There is no delay while a
step is in progress, since arrivals gather by themselves, and none while another worker is idle, since it serves the
next prompt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from cluster.admission import tuning
from cluster.admission.admission_config import AdmissionConfig
from cluster.latency.latency_model import LatencyModel
from cluster.routing.routing_contracts import RouteDecision


@dataclass(frozen=True, slots=True)
class BatchingView:
    """Inputs of the batching delay of one prompt.

    Attributes:
        slack_ms: the TTFT target less the predicted TTFT.
        gap_ms: typical time between arrivals.
        fixed_ms: fixed cost of a step on the prefill worker.
        own_ms: cost that this prompt adds to the step.
        room_tokens: the step's token budget left after this prompt.
        prompt_tokens: uncached tokens of this prompt.
        wait_ms: predicted wait for prompts that the worker has.
        idle_workers: other workers that could compute the next prompt at once.
    """

    slack_ms: float
    gap_ms: float
    fixed_ms: float
    own_ms: float
    room_tokens: int
    prompt_tokens: int
    wait_ms: float = 0.0
    idle_workers: int = 0


def batching_delay_ms(view: BatchingView, config: AdmissionConfig) -> float:
    """Milliseconds to wait for other prompts; 0 if the prompt should be dispatched at once."""
    if view.wait_ms > 0 or view.idle_workers > 0:
        return 0.0
    if view.room_tokens < view.prompt_tokens:  # a second prompt of this size would not fit
        return 0.0
    num_fit = view.room_tokens // max(1, view.prompt_tokens)
    delay_ms = min(view.gap_ms * (num_fit + 1), config.gather_share * view.slack_ms, config.gather_ms)
    if config.gather_for == "latency":
        break_even_ms = (view.fixed_ms - view.own_ms) / 2
        if view.gap_ms >= break_even_ms:
            return 0.0
        delay_ms = min(delay_ms, break_even_ms)
    return delay_ms if delay_ms >= max(tuning.SHORTEST_DELAY_MS, view.gap_ms) else 0.0


class ArrivalGaps:
    """Typical time between the last few arrivals. A pause ends a burst and resets the estimate."""

    def __init__(self) -> None:
        self._last_s: float | None = None
        self._gap_ms = tuning.LONGEST_GAP_MS

    @property
    def gap_ms(self) -> float:
        return self._gap_ms

    def observe(self, now_s: float) -> None:
        if self._last_s is not None:
            gap_ms = min(tuning.LONGEST_GAP_MS, max(0.0, now_s - self._last_s) * 1e3)
            weight = 1.0 if gap_ms > 10 * self._gap_ms or self._gap_ms >= tuning.LONGEST_GAP_MS else tuning.GAP_WEIGHT
            self._gap_ms += weight * (gap_ms - self._gap_ms)
        self._last_s = now_s


class BatchingDelay:
    """Decides about the batching delay of each prompt.

    Args:
        prefill_chunk_tokens: returns the step budget of every prefill worker that takes requests, by its id.
        config: how long prompts are held, and for what.
    """

    def __init__(
        self, model: LatencyModel, prefill_chunk_tokens: Callable[[], dict[str, int]], config: AdmissionConfig
    ) -> None:
        self._config = config
        self._model = model
        self._prefill_chunk_tokens = prefill_chunk_tokens
        self._arrivals = ArrivalGaps()

    def arrived(self, now_s: float) -> None:
        """Counts an arrival."""
        self._arrivals.observe(now_s)

    def delay_ms(
        self,
        decision: RouteDecision,
        num_prompt_tokens: int,
        *,
        slack_ms: float,
        computes_prompts: Callable[[str], bool],
        delayed_tokens: int = 0,
    ) -> float:
        """The batching delay, in milliseconds, of a request that has room.

        Args:
            slack_ms: its TTFT target less the predicted TTFT.
            computes_prompts: whether a prefill worker has prompts to compute.
            delayed_tokens: tokens of already delayed prompts that will share its step.
        """
        worker_id = decision.prefill_id
        # Most requests return here, which saves the queries of the model.
        if worker_id is None or decision.wait_ms > 0 or self._arrivals.gap_ms > self._config.gather_ms:
            return 0.0
        workers = self._prefill_chunk_tokens()
        uncached = max(1, num_prompt_tokens - decision.cached_tokens)
        fixed_ms = self._model.step_ms(worker_id, 0, 0).ms
        alone_ms = self._model.prefill_ms(worker_id, uncached, decision.cached_tokens).ms
        return batching_delay_ms(
            BatchingView(
                slack_ms=slack_ms,
                gap_ms=self._arrivals.gap_ms,
                fixed_ms=fixed_ms,
                own_ms=max(0.0, alone_ms - fixed_ms),
                room_tokens=workers.get(worker_id, 0) - uncached - delayed_tokens,
                prompt_tokens=uncached,
                wait_ms=decision.wait_ms,
                idle_workers=sum(other != worker_id and not computes_prompts(other) for other in workers),
            ),
            self._config,
        )


T = TypeVar("T")


class DelayedRequests(Generic[T]):
    """Requests in their batching delay. They all leave when the delay of the first one ends.

    Args:
        leave: called with each of them, in order.
    """

    def __init__(self, leave: Callable[[T], None]) -> None:
        self._leave = leave
        self._delayed: list[T] = []
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._delayed)

    def __iter__(self) -> Iterator[T]:
        return iter(self._delayed)

    def add(self, item: T, delay_s: float) -> None:
        """Adds a request. If others are delayed, it leaves with them and ``delay_s`` has no effect."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(delay_s, self.open)
        self._delayed.append(item)

    def remove(self, item: T) -> None:
        if item in self._delayed:
            self._delayed.remove(item)

    def open(self) -> None:
        """Lets all requests leave now."""
        for item in self.clear():
            self._leave(item)

    def clear(self) -> list[T]:
        """Removes and returns all requests without calling ``leave``."""
        if self._timer is not None:
            self._timer.cancel()
        delayed, self._delayed, self._timer = self._delayed, [], None
        return delayed
