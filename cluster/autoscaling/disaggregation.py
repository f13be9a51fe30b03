"""Is it worth it here to compute prompts and answers on separate pools? The answer, and the figures behind it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from baton.core.roles import DECODE, PREFILL
from cluster.autoscaling import tuning
from cluster.autoscaling.costs import PoolCosts
from cluster.autoscaling.decode_capacity import decode_forecast, expected_tpot_ms
from cluster.autoscaling.demand import Demand


class Verdict(StrEnum):
    """The answer in one word."""

    UNKNOWN = "unknown"
    WORTH_IT = "worth_it"
    NOT_AT_THIS_LOAD = "not_at_this_load"
    NO_DIFFERENCE = "no_difference"
    HARMFUL = "harmful"
    NEITHER = "neither"


class Source(StrEnum):
    """Where a figure comes from: counted traffic, the latency model's fit to measured steps, or a forecast."""

    MEASURED = "measured"
    FITTED = "fitted"
    PREDICTED = "predicted"


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure behind the answer.

    Attributes:
        unit: ``requests``, ``requests/s``, ``tokens``, ``ms`` or ``share``.
        value: ``None`` if the workers could not keep up, or no answer has a second token.
    """

    name: str
    value: float | None
    unit: str
    source: Source


@dataclass(frozen=True, slots=True)
class Disaggregation:
    """The answer.

    Attributes:
        text: the verdict as one or two sentences.
    """

    verdict: Verdict
    text: str
    figures: tuple[Figure, ...]


def unknown(demand: Demand, missing: str) -> Disaggregation:
    """There is no answer, for the reason ``missing``."""
    seen = Figure("Requests in the last five minutes", demand.num_requests, "requests", Source.MEASURED)
    return Disaggregation(Verdict.UNKNOWN, f"No answer: {missing}", (seen,))


def judge_disaggregation(
    demand: Demand, costs: Mapping[str, PoolCosts], sizes: Mapping[str, int], *, pools: float, aggregated: float
) -> Disaggregation:
    """Compares two pools with as many workers that do both.

    Args:
        sizes: workers by pool.
        pools: highest rate at which the best two pools meet the targets, in requests per second.
        aggregated: the same for workers that do both.
    """
    verdict, text = _verdict(demand.rate, sum(sizes.values()), pools, aggregated)
    rates = (
        Figure("Highest rate within targets, best two pools", pools, "requests/s", Source.PREDICTED),
        Figure("Highest rate within targets, doing both", aggregated, "requests/s", Source.PREDICTED),
    )
    return Disaggregation(verdict, text, (*_traffic(demand), *_work(demand, costs, sizes), *rates))


def _verdict(rate: float, workers: int, pools: float, aggregated: float) -> tuple[Verdict, str]:
    both = f"{workers} aggregated workers"
    if not pools and not aggregated:
        return Verdict.NEITHER, f"Neither two pools nor {both} meet the targets, however low the rate is."
    if aggregated >= tuning.CLEAR_GAIN * pools:
        return (
            Verdict.HARMFUL,
            f"Disaggregation hurts this workload: {both} could serve {rate_text(aggregated)} within the targets, two "
            f"pools {rate_text(pools)}.",
        )
    if pools < tuning.CLEAR_GAIN * aggregated:
        return (
            Verdict.NO_DIFFERENCE,
            f"Disaggregation makes no difference here: {rate_text(pools)} with two pools, {rate_text(aggregated)} with "
            f"{both}.",
        )
    if rate <= aggregated:
        return (
            Verdict.NOT_AT_THIS_LOAD,
            f"Disaggregation is not needed at this load: {rate_text(rate)} arrive, and {both} could serve "
            f"{rate_text(aggregated)} within the targets. Beyond that it pays off: two pools can serve "
            f"{rate_text(pools)}.",
        )
    return (
        Verdict.WORTH_IT,
        f"Disaggregation pays off: two pools can serve {rate_text(pools)} within the targets, {both} "
        f"{rate_text(aggregated)}, and {rate_text(rate)} arrive.",
    )


def _traffic(demand: Demand) -> tuple[Figure, ...]:
    def mean(total: float) -> float:
        return total / demand.rate

    present, measured = demand.present, Source.MEASURED
    return (
        Figure("Requests in the last five minutes", demand.num_requests, "requests", measured),
        Figure("Arrivals in the last minute or less", demand.rate, "requests/s", measured),
        Figure("Prompt", mean(sum(part.rate * part.prompt_tokens for part in present)), "tokens", measured),
        Figure(
            "Prompt, not cached", mean(sum(part.rate * part.uncached_tokens for part in present)), "tokens", measured
        ),
        Figure("Answer", mean(sum(part.rate * part.output_tokens for part in present)), "tokens", measured),
    )


def _work(demand: Demand, costs: Mapping[str, PoolCosts], sizes: Mapping[str, int]) -> tuple[Figure, ...]:
    """What prompts, hand-offs and tokens take, on two pools as now and on workers that do both."""
    workers = sum(sizes.values())
    groups = [(part.rate * group.share, group) for part in demand.present for group in part.prompts]
    prompts_s = sum(rate * costs[PREFILL].prefill_ms(own.uncached_tokens, own.cached_tokens) for rate, own in groups)
    handoffs_s = sum(rate * costs[DECODE].handoff_ms(own.uncached_tokens) for rate, own in groups)
    prefill_ms, handoff_ms = prompts_s / demand.rate, handoffs_s / demand.rate
    apart = expected_tpot_ms(demand, costs[DECODE], sizes[DECODE])
    beside = expected_tpot_ms(demand.with_local_share(1.0), costs[DECODE], workers)
    undisturbed = expected_tpot_ms(demand.with_local_share(0.0), costs[DECODE], workers)
    share = prefill_ms / (prefill_ms + _decode_ms(demand, costs[DECODE], sizes[DECODE]))
    return (
        Figure("Prefill of a prompt", prefill_ms, "ms", Source.FITTED),
        Figure("Hand-off of its KV", handoff_ms, "ms", Source.FITTED),
        Figure("Share of the work that is prefill", share, "share", Source.FITTED),
        Figure("TPOT, two pools as now", apart, "ms", Source.PREDICTED),
        Figure("TPOT, doing both", beside, "ms", Source.PREDICTED),
        Figure("TPOT, the same without prompts in between", undisturbed, "ms", Source.PREDICTED),
    )


def _decode_ms(demand: Demand, costs: PoolCosts, workers: int) -> float:
    """Milliseconds of a worker for the answer of a request, whose steps it shares with others."""
    forecast = decode_forecast(demand.with_local_share(0.0), costs, workers)
    sequences = max(1.0, forecast.concurrency / workers)
    return forecast.concurrency / sequences / demand.rate * 1e3


def rate_text(value: float) -> str:
    """Requests per second in three digits."""
    return f"{value:.0f} requests/s" if value >= 100 else f"{value:.3g} requests/s"
