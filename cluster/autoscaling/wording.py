"""A plan in sentences, with its numbers."""

from __future__ import annotations

from baton.core.roles import DECODE, PREFILL
from cluster.autoscaling import tuning
from cluster.autoscaling.forecast import PoolForecast
from cluster.autoscaling.observation import Observation, PoolCounts
from cluster.autoscaling.pool_rules import PoolState, Reason, Sizing
from cluster.autoscaling.requirement import Requirement
from cluster.autoscaling.role_change import RoleChange
from cluster.autoscaling.scaling_limits import PoolLimits, ScalingLimits


def explain_pool(
    pool: str, observation: Observation, limits: ScalingLimits, needs: Requirement, sizing: Sizing
) -> tuple[str, ...]:
    """Explains a pool's new size, without role changes."""
    counts = observation.pools[pool].counts
    texts = [f"{pool} {_change(counts.target, sizing.target)}: {_because(pool, observation, limits, needs, sizing)}"]
    if needs.is_known and not needs.is_idle:
        texts += [_unreachable_targets(_targets(pool, observation), name) for name in needs.now.hopeless]
    if needs.is_known and pool == PREFILL and observation.demand.local_share > 0:
        share = _percent(observation.demand.local_share)
        texts.append(f"This counts with {share} of the prompt tokens on decode workers.")
    if counts.starting and sizing.target >= counts.target:
        texts.append(f"{counts.starting} of its workers {_still(counts.starting)} starting and already counted.")
    if counts.pending and counts.reason and counts.pending_s >= limits.place_timeout_s:
        texts.append(counts.reason)
    return tuple(texts)


def explain_role_change(change: RoleChange) -> str:
    """A role change in one sentence."""
    start_s = change.start_s
    other = "no node has room for a new worker" if start_s is None else f"a new worker would take {start_s:.3g} s"
    return (
        f"A {change.source} worker becomes a {change.destination} worker: this takes about {change.cost_s:.3g} s "
        f"including the drain, and {other}."
    )


def _change(before: int, after: int) -> str:
    return f"{before} → {after}" if before != after else f"stays at {after}"


def _still(number: int) -> str:
    return "is" if number == 1 else "are"


def _because(pool: str, observation: Observation, limits: ScalingLimits, needs: Requirement, sizing: Sizing) -> str:
    counts, bounds = observation.pools[pool].counts, limits.pools[pool]
    match sizing.reason:
        case Reason.PINNED:
            return f"its size was set manually; `baton scale {pool}=auto` returns it to the autoscaler."
        case Reason.COLD:
            return _what_is_missing(pool, observation)
        case Reason.UNPLACED:
            return _unplaced(counts, sizing.state, sizing, observation.now_s)
        case Reason.IDLE:
            return f"no requests have arrived or waited for at least {limits.calm_s:g} s."
        case Reason.WAKE:
            return "requests have come, and the pool has no worker."
        case Reason.QUEUE if not needs.is_known:
            waiting = _number(observation.pools[pool].load)
            return f"{waiting} prompts wait, and the queue grows; {_what_is_missing(pool, observation)}"
    load = _load(pool, observation, needs)
    if sizing.reason is Reason.LIMITS:
        edge = f"at most {bounds.max}" if sizing.wanted >= bounds.max else f"at least {bounds.min}"
        return f"{load} {_too_many(needs, bounds, limits)}The configuration allows {edge}."
    if sizing.reason is Reason.CALM and needs.fewer is not None:
        return f"{load} {_fewer(_targets(pool, observation), needs.fewer, limits)}"
    if sizing.target > counts.target:
        if beyond := _too_many(needs, bounds, limits):
            return f"{load} {beyond}The configuration allows at most {bounds.max}."
        return f"{load} {sizing.wanted} workers meet the targets with {_percent(limits.headroom)} headroom."
    return load


def _too_many(needs: Requirement, bounds: PoolLimits, limits: ScalingLimits) -> str:
    """The needed size, if it exceeds the limit; empty otherwise."""
    if needs.asked <= bounds.max:
        return ""
    return f"It takes {_workers(needs.asked)} to meet the targets with {_percent(limits.headroom)} headroom. "


def _load(pool: str, observation: Observation, needs: Requirement) -> str:
    """The load, and the forecast of the pool's present size."""
    if needs.is_idle:
        return f"no requests arrive or wait{_seen_before(observation)}."
    if not needs.is_known:
        return _what_is_missing(pool, observation)
    now = needs.now
    rate = now.concurrency / now.work_s if now.work_s else 0.0  # the rate on this pool only
    work = f"{_number(rate)} requests/s × {_seconds(now.work_s)} each"
    if pool == DECODE:
        part = (
            f"{work} are {_number(now.concurrency)} concurrent sequences; a worker meets the targets with up to "
            f"{now.per_worker:.3g}{f', all for which {now.room} has room' if now.room else ''}; "
            f"the load is {_percent(now.utilisation)} of the capacity of {_workers(now.workers)}"
        )
    else:
        part = f"{work} are {_percent(now.utilisation)} of the capacity of {_workers(now.workers)}"
    waiting = observation.pools[pool].load
    held = f", and {_number(observation.waiting)} wait in the router" if observation.waiting else ""
    piled = f" {_number(waiting)} run or wait on workers{held}." if needs.by_queue else ""
    return f"{part}; predicted to meet {_targets(pool, observation)}: {_kept(now)}.{piled}"


def _seen_before(observation: Observation) -> str:
    """Why a pool is idle although requests were served a moment ago; empty if there were none."""
    if not (seen := observation.demand.num_requests):
        return ""
    return (
        f" at present: the last {tuning.RECENT_S} s had none, though the last {tuning.HISTORY_S // 60} minutes had "
        f"{seen}. A plan is for the load of this moment, so ask while requests arrive"
    )


def _kept(now: PoolForecast) -> str:
    """The lowest attainment and, if some classes are hopeless, the lowest of the others, which decides."""
    lowest = _percent(now.lowest_attainment)
    others = [share for name, share in (now.attainment or {}).items() if name not in now.hopeless]
    if not now.hopeless or not others:
        return lowest
    return f"{lowest}, {_percent(min(others))} where more workers help"


def _fewer(targets: str, fewer: PoolForecast, limits: ScalingLimits) -> str:
    return (
        f"With {_workers(fewer.workers)} and {_percent(limits.headroom)} more load, "
        f"{_percent(fewer.lowest_attainment)} would meet {targets}; this has held for {limits.calm_s:g} s."
    )


def _unplaced(counts: PoolCounts, state: PoolState, sizing: Sizing, now_s: float) -> str:
    wait_s = max(0.0, state.retry_s - now_s)
    return (
        f"the load needs {sizing.wanted} workers, but Ray could not place more than {state.stuck_at}; "
        f"the next attempt is in {wait_s:.0f} s."
    )


def _what_is_missing(pool: str, observation: Observation) -> str:
    seen = observation.demand.num_requests
    if seen < tuning.MIN_REQUESTS:
        return f"{seen} requests were observed; {tuning.MIN_REQUESTS} are needed to estimate a rate."
    return f"the latency model has not observed enough steps of {pool} workers yet."


def _targets(pool: str, observation: Observation) -> str:
    """The targets that depend on a pool."""
    if pool == PREFILL:
        return "TTFT"
    return "TPOT" if observation.demand.local_share <= 0 else "TPOT, and TTFT of its own prompts"


def _unreachable_targets(targets: str, name: str) -> str:
    return (
        f"Some requests of class {name} miss {targets} even on an idle worker; more workers cannot help "
        "them, so they do not count."
    )


def _workers(number: int) -> str:
    return "1 worker" if number == 1 else f"{number} workers"


def _number(value: float) -> str:
    """A number with three digits, without an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _percent(share: float) -> str:
    return f"{_number(share * 100)} %"


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"
