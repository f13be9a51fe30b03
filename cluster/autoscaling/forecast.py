"""What a pool of a given size would make of a demand, and the smallest size that keeps the promises."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import sqrt

from baton.core.slo import SloClass

MAX_UTILISATION = 0.9
"""Beyond it, queues grow faster than any forecast: arrivals come in bursts."""
LEAST_ADDED = 0.02
"""A prompt that shares its steps adds at least this share of what it takes alone."""


@dataclass(frozen=True, slots=True)
class PoolForecast:
    """
    Attributes:
        utilisation: demand as a share of what the pool can do within the targets; above 1: the queue grows for ever.
        attainment: share of requests that would keep the pool's target, by class.
        keeps: every class with a rate gets what it was promised, as far as an idle worker could give it.
        work_s: what a request takes: computing its prompt, or decoding its answer.
        concurrency: requests at work, mean of the whole pool.
        per_worker: of these, the most that one worker can have within the targets.
        hopeless: classes that have requests which miss the target even on an idle worker.
    """

    workers: int
    utilisation: float = 0.0
    attainment: Mapping[str, float] | None = None
    keeps: bool = True
    work_s: float = 0.0
    concurrency: float = 0.0
    per_worker: float = 1.0
    hopeless: tuple[str, ...] = ()

    @property
    def lowest_attainment(self) -> float:
        """Of the classes; 1 without any."""
        return min((self.attainment or {}).values(), default=1.0)


def pool_objective(slo: SloClass) -> float:
    """Share of requests that each pool must serve in time, so that as many as were promised keep both targets."""
    return sqrt(slo.objective)


def fewest_workers(forecast: Callable[[int], PoolForecast], least: int, most: int) -> PoolForecast:
    """The smallest pool from ``least`` to ``most`` workers that keeps the promises; ``most`` when none does."""
    low, high = least, most
    while low < high:
        middle = (low + high) // 2
        if forecast(middle).keeps:
            high = middle
        else:
            low = middle + 1
    return forecast(low)
