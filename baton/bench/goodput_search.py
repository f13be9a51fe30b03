"""Search of the goodput: the highest request rate at which enough requests meet their objectives, as in DistServe
(OSDI'24, section 2.3). The rate is bracketed by doubling and halving, then bisected."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from scipy.stats import binomtest

_STEP = 2.0


@dataclass(frozen=True, slots=True)
class SearchLimits:
    """Limits of a search.

    Attributes:
        start: first probed rate, in requests/s.
        lowest, highest: bounds of the probed rates.
        precision: the search ends when the highest holding and the lowest failing rate are within this share.
        max_rates: largest number of probed rates.
        goal: share of the requests that must meet the objectives, in (0, 1).
        max_repeats: largest number of probes of one rate.
    """

    start: float = 1.0
    lowest: float = 0.05
    highest: float = 1000.0
    precision: float = 0.05
    max_rates: int = 16
    goal: float = 0.9
    max_repeats: int = 3


@dataclass(slots=True)
class RateVerdict:
    """The combined result of all probes of one rate.

    Attributes:
        num_good: requests that met the objectives.
        num_requests: all measured requests, including failures.
        num_probes: number of probes.
    """

    rate: float
    goal: float
    num_good: int = 0
    num_requests: int = 0
    num_probes: int = 0

    def add(self, num_good: int, num_requests: int) -> None:
        self.num_good += num_good
        self.num_requests += num_requests
        self.num_probes += 1

    @property
    def attainment(self) -> float:
        return self.num_good / self.num_requests if self.num_requests else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval of the attainment for independent requests; (0, 1) without requests."""
        if not self.num_requests:
            return 0.0, 1.0
        return share_interval(self.num_good, self.num_requests)

    @property
    def is_certain(self) -> bool:
        low, high = self.interval
        return low >= self.goal or high < self.goal

    @property
    def holds(self) -> bool:
        return self.attainment >= self.goal


@dataclass(slots=True)
class SearchResult:
    """The result of a search.

    Attributes:
        goodput: highest rate that held, in requests/s; ``None`` if none did.
        failed_at: lowest rate above it that did not hold; ``None`` if the highest allowed rate held.
        verdicts: verdicts of all rates, in the order of probing.
        unmeasured_at: rate at which no request was measured, which ended the search.
        is_complete: True if the bracket is narrow enough, or an end of the allowed range is the answer.
    """

    goodput: float | None = None
    failed_at: float | None = None
    verdicts: list[RateVerdict] = field(default_factory=list)
    is_complete: bool = False
    unmeasured_at: float | None = None


Probe = Callable[[float], Awaitable[tuple[int, int] | None]]
"""Probes a rate. Returns (good requests, all requests), or ``None`` if the search was interrupted."""


async def search_goodput(probe: Probe, limits: SearchLimits) -> SearchResult:
    """Searches the goodput. Each rate is probed until its verdict is certain, at most ``max_repeats`` times.

    The search assumes that all rates below a holding rate hold too.
    """
    result = SearchResult()
    rate: float | None = min(max(limits.start, limits.lowest), limits.highest)
    while rate is not None and len(result.verdicts) < limits.max_rates:
        verdict = await _judge(probe, rate, limits)
        if verdict is None:
            return result
        if verdict.num_requests == 0:
            result.unmeasured_at = rate
            return result
        result.verdicts.append(verdict)
        if verdict.holds:
            result.goodput = rate
        else:
            result.failed_at = rate
        rate = _next_rate(result, limits)
    result.is_complete = rate is None
    return result


async def _judge(probe: Probe, rate: float, limits: SearchLimits) -> RateVerdict | None:
    verdict = RateVerdict(rate, limits.goal)
    while verdict.num_probes < limits.max_repeats and not (verdict.num_probes and verdict.is_certain):
        counts = await probe(rate)
        if counts is None:
            return None
        verdict.add(*counts)
    return verdict


def _next_rate(result: SearchResult, limits: SearchLimits) -> float | None:
    """The next rate to probe; ``None`` if the search is complete."""
    held, failed = result.goodput, result.failed_at
    if held is None and failed is not None:
        return max(failed / _STEP, limits.lowest) if failed > limits.lowest else None
    if held is not None and failed is None:
        return min(held * _STEP, limits.highest) if held < limits.highest else None
    if held is None or failed is None or failed / held <= 1 + limits.precision:
        return None
    return math.sqrt(held * failed)


def share_interval(num: int, total: int) -> tuple[float, float]:
    """Wilson's 95 % confidence interval of the share ``num / total``; ``total`` is at least 1."""
    interval = binomtest(num, total).proportion_ci(0.95, method="wilson")
    return float(interval.low), float(interval.high)
