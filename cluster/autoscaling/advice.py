"""Advice on a better use of the same workers for the observed traffic: pool ratio, local prompts and drafts.

Options are compared by their capacity: the highest rate of this mix at which both targets are met.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from baton.core.roles import DECODE, PREFILL
from cluster.autoscaling import tuning
from cluster.autoscaling.costs import PoolCosts
from cluster.autoscaling.decode_capacity import decode_forecast
from cluster.autoscaling.demand import ClassDemand, Demand
from cluster.autoscaling.disaggregation import Disaggregation, judge_disaggregation, unknown
from cluster.autoscaling.prefill_capacity import prefill_forecast


@dataclass(frozen=True, slots=True)
class Option:
    """One way to use the workers.

    Attributes:
        prefill: number of prefill workers; 0 means aggregated, with every worker doing both.
        local_share: share of the uncached prompt tokens that decode workers compute at that capacity.
        capacity: requests per second that meet the targets; 0 means that not even a low rate does.
        limit: what a higher rate would exceed first, for people.
    """

    prefill: int
    decode: int
    local_share: float
    capacity: float
    limit: str


@dataclass(frozen=True, slots=True)
class DraftFigures:
    """Speculation at one batch size: tokens of a sequence per step, and TPOT with and without drafts.

    Attributes:
        is_present: True for the batch of the present load, False for the largest one that meets the targets.
    """

    batch: int
    is_present: bool
    tokens_per_round: float
    tpot_ms: float
    plain_tpot_ms: float

    @property
    def gain(self) -> float:
        """Speed-up by drafts; above 1 if they pay."""
        return self.plain_tpot_ms / self.tpot_ms


@dataclass(frozen=True, slots=True)
class Advice:
    """The result of :func:`advise`.

    Attributes:
        rate: observed requests per second.
        disaggregation: whether two pools are worth it.
        missing: the data that is missing; if it is not empty, the later attributes are unset.
        local_share: share of the uncached prompt tokens that decode workers compute at the present rate.
        now: the present pools. The router chooses which prompts are local by the load, unless local prefill is off.
        best: the best pair of pools with as many workers.
        aggregated: all workers doing both.
    """

    rate: float
    num_requests: int
    disaggregation: Disaggregation
    missing: str = ""
    local_share: float = 0.0
    now: Option | None = None
    best: Option | None = None
    aggregated: Option | None = None
    drafts: tuple[DraftFigures, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {**asdict(self), "drafts": [{**asdict(one), "gain": round(one.gain, 4)} for one in self.drafts]}


def advise(demand: Demand, costs: Mapping[str, PoolCosts], sizes: Mapping[str, int]) -> Advice:
    """Compares the present use of the workers with other options.

    Args:
        demand: the demand, with the present share of local prompts.
        sizes: workers by pool.
    """
    missing = _missing(demand, costs)
    if missing:
        return Advice(demand.rate, demand.num_requests, unknown(demand, missing), missing)
    if demand.local_share < tuning.SMALLEST_LOCAL_SHARE:
        demand = demand.with_local_share(0.0)
    total = sum(sizes.values())
    now = _present(demand, costs, sizes[PREFILL], sizes[DECODE])
    options = _splits(demand, costs, total)
    most = max(option.capacity for option in [now, *options])
    # Among options of similar capacity, the one with the fewest prompts in decode steps.
    good = [option for option in options if option.capacity * tuning.CLEAR_GAIN >= most]
    best = min(good, key=lambda option: (option.local_share, -option.capacity), default=now)
    if best.capacity < tuning.CLEAR_GAIN * now.capacity:
        best = now
    aggregated = _aggregated(demand, costs, total)
    return Advice(
        demand.rate,
        demand.num_requests,
        judge_disaggregation(demand, costs, sizes, pools=best.capacity, aggregated=aggregated.capacity),
        "",
        demand.local_share,
        now,
        best,
        aggregated,
        _drafts(demand, costs, sizes),
    )


def _missing(demand: Demand, costs: Mapping[str, PoolCosts]) -> str:
    if demand.num_requests < tuning.REQUESTS_FOR_ADVICE:
        return (
            f"not enough traffic yet: {demand.num_requests} of {tuning.REQUESTS_FOR_ADVICE} requests arrived in the "
            "last five minutes."
        )
    if demand.rate <= 0:
        return "no requests have arrived recently, and the advice depends on their rate. Ask again under load."
    unmeasured = [name for name in (PREFILL, DECODE) if name not in costs or not costs[name].is_measured]
    return (
        f"the latency model has not observed enough steps of {' and '.join(unmeasured)} workers yet."
        if unmeasured
        else ""
    )


def _present(demand: Demand, costs: Mapping[str, PoolCosts], prefill: int, decode: int) -> Option:
    """The present pools, with the share of local prompts that suits them best."""
    shares = _shares(demand) if demand.local_share else (0.0,)
    options = [_pools(demand.with_local_share(share), costs, prefill, decode) for share in shares]
    most = max(option.capacity for option in options)
    return next(option for option in options if option.capacity * tuning.CLEAR_GAIN >= most)


def _shares(demand: Demand) -> tuple[float, ...]:
    """The shares of local prompts to compare, the present one first."""
    return tuple(dict.fromkeys((demand.local_share, *tuning.LOCAL_SHARES)))


def _splits(demand: Demand, costs: Mapping[str, PoolCosts], total: int) -> list[Option]:
    """The best ratio for each share of local prompts."""
    options = []
    for share in _shares(demand):
        asked = demand.with_local_share(share)
        # More prefill workers raise prefill capacity and lower decode capacity: the best ratio is at the crossing.
        low, high = 1, max(1, total - 1)
        while low < high:
            middle = (low + high) // 2
            enough = _prefill_factor(asked, costs, middle) >= _decode_factor(asked, costs, total - middle)
            low, high = (low, middle) if enough else (middle + 1, high)
        for prefill in {max(1, low - 1), low}:
            if total - prefill >= 1:
                options.append(_pools(asked, costs, prefill, total - prefill))
    return options


def _aggregated(demand: Demand, costs: Mapping[str, PoolCosts], total: int) -> Option:
    """The option in which every worker computes the prompts of the sequences that decode on it."""
    asked = demand.with_local_share(1.0)
    factor = _decode_factor(asked, costs, total)
    return Option(0, total, 1.0, demand.rate * factor, _decode_limit(asked.scaled(factor), costs, total))


def _pools(demand: Demand, costs: Mapping[str, PoolCosts], prefill: int, decode: int) -> Option:
    """The option of two pools, with the demand's share of local prompts."""
    of_prefill, of_decode = _prefill_factor(demand, costs, prefill), _decode_factor(demand, costs, decode)
    factor = min(of_prefill, of_decode)
    limit = (
        "the TTFT of prompts on prefill workers"
        if of_prefill < of_decode
        else _decode_limit(demand.scaled(factor), costs, decode)
    )
    return Option(prefill, decode, demand.local_share, demand.rate * factor, limit)


def _decode_limit(demand: Demand, costs: Mapping[str, PoolCosts], workers: int) -> str:
    """What limits decode workers at their largest demand."""
    forecast = decode_forecast(demand, costs[DECODE], workers)
    if forecast.room:
        return forecast.room
    return "the TPOT on decode workers" + (", or the TTFT of their own prompts" if demand.local_share > 0 else "")


def _prefill_factor(demand: Demand, costs: Mapping[str, PoolCosts], workers: int) -> float:
    away, spills = demand.split()[0], demand.local_share > 0  # as in a plan
    return _largest_factor(
        lambda factor: prefill_forecast(away.scaled(factor), costs[PREFILL], workers, spills=spills).keeps
    )


def _decode_factor(demand: Demand, costs: Mapping[str, PoolCosts], workers: int) -> float:
    return _largest_factor(lambda factor: decode_forecast(demand.scaled(factor), costs[DECODE], workers).keeps)


def _largest_factor(keeps: Callable[[float], bool]) -> float:
    """The factor by which the rate may grow; 0 if not even a thousandth of the rate meets the targets."""
    low, high = 1.0 / tuning.LARGEST_DEMAND_FACTOR, tuning.LARGEST_DEMAND_FACTOR
    if not keeps(low):
        return 0.0
    for _ in range(tuning.CAPACITY_HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low


def _mean(demand: Demand, of: Callable[[ClassDemand], float]) -> float:
    """Mean of a value over all requests."""
    return sum(part.rate * of(part) for part in demand.present) / demand.rate


def _drafts(demand: Demand, costs: Mapping[str, PoolCosts], sizes: Mapping[str, int]) -> tuple[DraftFigures, ...]:
    """Figures at the present batch size, and at the largest one that meets the targets."""
    own = costs[DECODE]
    forecast = decode_forecast(demand, own, sizes[DECODE])
    context = _mean(demand, lambda part: part.prompt_tokens)
    present = max(1, min(own.max_num_seqs, round(forecast.concurrency / sizes[DECODE])))
    return tuple(
        DraftFigures(
            batch,
            batch == present,
            own.tokens_per_round(batch),
            own.tpot_ms(batch, context),
            own.plain_tpot_ms(batch, context),
        )
        for batch in sorted({present, max(1, int(forecast.per_worker))})
    )
