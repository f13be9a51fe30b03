"""Capacity of a decode pool: the number of sequences that can share its steps within their TPOT targets.

By Little's law, the number of concurrent sequences is their rate times the duration of decoding. Local prompts slow the
steps of sequences and are slowed by them, but share the fixed cost of decode steps.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import cache
from math import ceil, exp

from cluster.autoscaling import tuning
from cluster.autoscaling.costs import PoolCosts
from cluster.autoscaling.demand import ClassDemand, Demand
from cluster.autoscaling.forecast import PoolForecast, pool_objective
from cluster.autoscaling.prefill_capacity import prefill_forecast
from cluster.autoscaling.queueing import poisson_at_most


def decode_forecast(demand: Demand, costs: PoolCosts, workers: int) -> PoolForecast:
    """Attainment of the TPOT targets by ``workers`` of a pool, which also compute ``demand.local_share`` of prompts.

    Local prompts have TTFT targets. The attainment of a class is the lower of the two.
    """
    parts, token_rate = _decoding(demand)
    local = _local(demand)
    if token_rate <= 0:  # requests for one token do not decode
        return prefill_forecast(local, costs, workers)
    alone_s, added_s = _prompts_s(local, costs)
    context = _mean_context(parts, token_rate)
    seats, tpot_s = _seats(costs, parts), _slowed_tpot_s(costs, context, added_s / workers)
    attainable = [_largest_batch(part, costs, seats, tpot_s, demand.local_share < 1) for part in parts]
    per_worker = min(batch for batch, _ in attainable)
    room = "" if per_worker < seats else "decode.max_num_seqs" if seats == costs.max_num_seqs else "the KV cache"
    concurrency = _concurrency(token_rate, workers, seats, tpot_s)
    at_work = token_rate * tpot_s(per_worker) if concurrency is None else concurrency
    # Probability that a worker has no sequence, so that a prompt pays for its steps alone.
    idle = exp(-at_work / workers)
    prompt_time = (added_s + idle * (alone_s - added_s)) / workers
    slowed = _prompt_slowdown(local, costs, at_work / workers, context)
    prompts = prefill_forecast(local, costs, workers, slowdown=slowed)
    kept_prompts = prompts.attainment or {}
    attainment, hopeless, keeps = {}, [], prompts.keeps
    for part, (batch, possible) in zip(parts, attainable, strict=True):
        share = 0.0 if concurrency is None else poisson_at_most(workers * batch, concurrency)
        attainment[part.slo.name] = min(share if possible else 0.0, kept_prompts.get(part.slo.name, 1.0))
        keeps = keeps and share >= pool_objective(part.slo)
        if not possible:
            hopeless.append(part.slo.name)
    attainment = {**kept_prompts, **attainment}  # classes whose answers are one token have only a TTFT
    hopeless += [name for name in prompts.hopeless if name not in hopeless]
    max_token_rate = workers * per_worker / tpot_s(per_worker)
    utilisation = max(token_rate / max_token_rate, prompt_time)
    work_s = at_work / sum(part.rate for part in parts)
    keeps = keeps and utilisation <= 1.0
    return PoolForecast(workers, utilisation, attainment, keeps, work_s, at_work, per_worker, tuple(hopeless), room)


def expected_tpot_ms(demand: Demand, costs: PoolCosts, workers: int) -> float | None:
    """Mean time per output token, whether it meets the targets or not.

    ``None`` if the workers cannot keep up, or no answer has a second token.
    """
    parts, token_rate = _decoding(demand)
    if token_rate <= 0:
        return None
    added_s = _prompts_s(_local(demand), costs)[1]
    tpot_s = _slowed_tpot_s(costs, _mean_context(parts, token_rate), added_s / workers)
    concurrency = _concurrency(token_rate, workers, _seats(costs, parts), tpot_s)
    return None if concurrency is None else concurrency / token_rate * 1e3


def _decoding(demand: Demand) -> tuple[list[ClassDemand], float]:
    """Returns (the classes that decode, their tokens per second)."""
    parts = [part for part in demand.present if part.output_tokens > 1]
    return parts, sum(part.rate * (part.output_tokens - 1) for part in parts)


def _local(demand: Demand) -> Demand:
    """The prompts that decode workers compute."""
    return demand.split()[1] if demand.local_share > 0 else Demand()


def _slowed_tpot_s(costs: PoolCosts, context: float, prompt_share: float) -> Callable[[int], float]:
    """Seconds per token by batch, on a worker that spends this share of its time on prompts."""
    slowdown = 1.0 / (1.0 - min(prompt_share, tuning.LARGEST_PROMPT_SHARE))

    @cache
    def tpot_s(batch: int) -> float:
        return costs.tpot_ms(batch, context) * slowdown / 1e3

    return tpot_s


def _mean_context(parts: list[ClassDemand], token_rate: float) -> float:
    return sum(part.rate * (part.output_tokens - 1) * _context(part) for part in parts) / token_rate


def _context(part: ClassDemand) -> float:
    """Context tokens of a sequence half-way through its answer."""
    return part.prompt_tokens + part.output_tokens / 2


def _prompts_s(local: Demand, costs: PoolCosts) -> tuple[float, float]:
    """Prompt seconds per second for all workers together, (in steps of their own, in shared decode steps)."""
    step_ms = costs.prefill_ms(1, 0)
    alone_ms = added_ms = 0.0
    for part in local.present:
        for group in part.prompts:
            ms = costs.prefill_ms(group.uncached_tokens, group.cached_tokens)
            steps = ceil(group.uncached_tokens / costs.chunk_tokens)
            alone_ms += part.rate * group.share * ms
            added_ms += part.rate * group.share * max(ms - steps * step_ms, tuning.SMALLEST_ADDED_SHARE * ms)
    return alone_ms / 1e3, added_ms / 1e3


def _prompt_slowdown(local: Demand, costs: PoolCosts, batch: float, context: float) -> float:
    """Slowdown factor of a prompt by the sequences that decode in its steps."""
    if not local.present:
        return 1.0
    batch = max(1, min(costs.max_num_seqs, round(batch)))
    tokens = sum(part.rate * part.uncached_tokens for part in local.present) / local.rate
    beside_ms = (costs.tpot_ms(batch, context) - costs.tpot_ms(1, context)) * costs.tokens_per_round(batch)
    return 1.0 + max(0.0, beside_ms) / costs.prefill_ms(min(tokens, float(costs.chunk_tokens)), 0)


def _seats(costs: PoolCosts, parts: list[ClassDemand]) -> int:
    """Sequences that fit into a worker's steps, and into its cache with their whole answers.

    Classes are weighted by decode time, since long answers occupy the cache for longer.
    """
    decoding = sum(part.rate * (part.output_tokens - 1) for part in parts)
    tokens = sum(
        part.rate * (part.output_tokens - 1) * (part.prompt_tokens + part.output_tokens) for part in parts
    ) / decoding  # fmt: skip
    fitting = int(costs.kv_tokens / tokens) if costs.kv_tokens else costs.max_num_seqs
    return max(1, min(costs.max_num_seqs, fitting))


def _largest_batch(
    part: ClassDemand, costs: PoolCosts, seats: int, tpot_s: Callable[[int], float], hands_off: bool
) -> tuple[int, bool]:
    """Returns (the largest batch in which the class meets its target, whether it can meet the target at all)."""
    handoff_s = costs.handoff_ms(min(part.prompt_tokens, costs.chunk_tokens)) / 1e3 if hands_off else 0.0
    limit_s = part.slo.tpot_s - handoff_s / (part.output_tokens - 1)
    possible = tpot_s(1) <= limit_s
    if not possible:
        limit_s = tuning.HOPELESS_TPOT_FACTOR * tpot_s(1)
    return max(1, bisect_left(range(1, seats + 1), True, key=lambda batch: tpot_s(batch) > limit_s)), possible


def _concurrency(token_rate: float, workers: int, seats: int, tpot_s: Callable[[int], float]) -> float | None:
    """Mean number of sequences that decode in the pool; ``None`` if it cannot keep up."""

    def keeps_up(batch: int) -> bool:
        return workers * batch / tpot_s(batch) >= token_rate

    batch = 1 + bisect_left(range(1, seats + 1), True, key=keeps_up)
    return None if batch > seats else token_rate * tpot_s(batch)
