"""Capacity of a prefill pool, modelled as a queue: the attainment of the TTFT targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.autoscaling import tuning
from cluster.autoscaling.costs import PoolCosts
from cluster.autoscaling.demand import ClassDemand, Demand
from cluster.autoscaling.forecast import PoolForecast, pool_objective
from cluster.autoscaling.queueing import wait_exceeds


@dataclass(frozen=True, slots=True)
class _Group:
    """Prompts of one size and class.

    Attributes:
        alone_s: seconds on an idle worker.
        fixed_s: the part of ``alone_s`` that is the fixed cost of a step.
        max_mates: number of prompts of this size that fit into a step.
    """

    rate: float
    alone_s: float
    fixed_s: float
    max_mates: float

    def load_s(self, mates: float) -> float:
        """Seconds that a prompt adds to a worker's work if ``mates`` prompts share a step."""
        shared = min(mates, self.max_mates)
        return max(self.alone_s - self.fixed_s * (1.0 - 1.0 / shared), tuning.SMALLEST_ADDED_SHARE * self.alone_s)

    def until_token_s(self, mates: float) -> float:
        """Seconds from the start of its steps to its first token, including the prompts that share them."""
        return self.alone_s + (min(mates, self.max_mates) - 1.0) * max(0.0, self.alone_s - self.fixed_s)


def prefill_forecast(
    demand: Demand, costs: PoolCosts, workers: int, *, spills: bool = False, slowdown: float = 1.0
) -> PoolForecast:
    """Attainment of the TTFT targets by ``workers`` of a pool.

    Many short prompts share steps, where each adds less work and waits for the others. The forecast uses the number of
    prompts per step that serves the demand best.

    Args:
        spills: True if prompts that would be late here go to decode workers instead.
        slowdown: slowdown factor of prompts by other work on the worker.
    """
    parts = sorted(demand.present, key=_turn)
    if not parts:
        return PoolForecast(workers)
    grouped = [_groups(part, costs, slowdown) for part in parts]
    most = max(group.max_mates for groups in grouped for group in groups)
    forecasts, mates = [], 1.0
    while mates == 1.0 or mates <= most:
        forecasts.append(_with_mates(parts, grouped, mates, workers, spills))
        if forecasts[-1].keeps:
            break
        mates *= 2
    return max(forecasts, key=lambda found: (found.keeps, found.lowest_attainment, -found.utilisation))


def _turn(part: ClassDemand) -> tuple[float, float]:
    """Sort key of the order of service. Equal keys are served in order of arrival."""
    return -part.slo.priority, part.slo.ttft_s


def _with_mates(
    parts: Sequence[ClassDemand], grouped: Sequence[Sequence[_Group]], mates: float, workers: int, spills: bool
) -> PoolForecast:
    every = [group for groups in grouped for group in groups]
    offered = _offered(every, mates)
    spills = spills and offered <= tuning.SPILL_UTILISATION * workers
    service_s, variation = _service_times(every, mates)
    attainment, hopeless, keeps = {}, [], offered <= tuning.MAX_UTILISATION * workers
    offers = [(_turn(part), _offered(groups, mates)) for part, groups in zip(parts, grouped, strict=True)]
    for part, groups, (own, _) in zip(parts, grouped, offers, strict=True):
        ahead = sum(offer for turn, offer in offers if turn < own)
        upto = sum(offer for turn, offer in offers if turn <= own)
        kept = possible = 0.0
        for group in groups:
            slack_s = part.slo.ttft_s - group.until_token_s(mates)
            if part.slo.ttft_s >= group.alone_s:
                possible += group.rate
                late = wait_exceeds(slack_s, workers, offered, ahead, upto, service_s, variation)
                kept += group.rate * (1.0 if spills and slack_s >= 0 else 1.0 - late)
        attainment[part.slo.name] = kept / part.rate
        if possible < 0.999 * part.rate:
            hopeless.append(part.slo.name)
        keeps = keeps and kept >= pool_objective(part.slo) * possible
    rate = sum(part.rate for part in parts)
    return PoolForecast(workers, offered / workers, attainment, keeps, offered / rate, offered, 1.0, tuple(hopeless))


def _groups(part: ClassDemand, costs: PoolCosts, slowdown: float) -> list[_Group]:
    fixed_s = slowdown * costs.prefill_ms(1, 0) / 1e3
    return [
        _Group(
            part.rate * group.share,
            slowdown * costs.prefill_ms(group.uncached_tokens, group.cached_tokens) / 1e3,
            fixed_s,
            max(1.0, costs.chunk_tokens / max(1.0, group.uncached_tokens)),
        )
        for group in part.prompts
    ]


def _offered(groups: Sequence[_Group], mates: float) -> float:
    """Offered load, in workers."""
    return sum(group.rate * group.load_s(mates) for group in groups)


def _service_times(groups: Sequence[_Group], mates: float) -> tuple[float, float]:
    """Returns (mean service seconds, their squared coefficient of variation)."""
    rate = sum(group.rate for group in groups)
    mean_s = sum(group.rate * group.until_token_s(mates) for group in groups) / rate
    alone_s = sum(group.rate * group.alone_s for group in groups) / rate
    squares = sum(group.rate * group.alone_s**2 for group in groups) / rate
    return mean_s, max(0.0, squares / alone_s**2 - 1.0)
