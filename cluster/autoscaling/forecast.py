"""Forecast of a pool of a given size for a demand, and the smallest size that meets the targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import sqrt

from baton.core.slo import SloClass


@dataclass(frozen=True, slots=True)
class PoolForecast:
    """The forecast of a pool of ``workers`` workers.

    Attributes:
        utilisation: demand as a share of the pool's capacity within the targets; above 1 the queue grows without bound.
        attainment: share of requests that meet the pool's target, by class.
        keeps: True if every class with a rate meets its objective, as far as an idle worker could.
        work_s: mean seconds to compute a prompt, or to decode an answer.
        concurrency: mean number of requests in progress in the whole pool.
        per_worker: largest number of requests in progress on one worker within the targets.
        room: what has room for no more of them, for people; empty where a target is the limit.
        hopeless: classes with requests that miss the target even on an idle worker.
    """

    workers: int
    utilisation: float = 0.0
    attainment: Mapping[str, float] | None = None
    keeps: bool = True
    work_s: float = 0.0
    concurrency: float = 0.0
    per_worker: float = 1.0
    hopeless: tuple[str, ...] = ()
    room: str = ""

    @property
    def lowest_attainment(self) -> float:
        """The lowest attainment of all classes; 1 without classes."""
        return min((self.attainment or {}).values(), default=1.0)


def pool_objective(slo: SloClass) -> float:
    """Share of requests that each pool must serve in time so that the class's objective holds for both targets."""
    return sqrt(slo.objective)


def fewest_workers(forecast: Callable[[int], PoolForecast], least: int, most: int) -> PoolForecast:
    """The smallest pool from ``least`` to ``most`` workers that meets the targets; ``most`` if none does."""
    low, high = least, most
    while low < high:
        middle = (low + high) // 2
        if forecast(middle).keeps:
            high = middle
        else:
            low = middle + 1
    return forecast(low)
