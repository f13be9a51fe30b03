"""The charts of a sweep: what each rate that was probed kept, and its latencies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import nan

import numpy as np

from baton.bench.charts import WIDE_RATIO, Chart, Series
from baton.bench.goodput_search import RateVerdict
from baton.bench.latency import percentile_ms
from baton.bench.sample import Sample
from baton.bench.stage_result import StageResult

_MEDIAN = 50.0
_RATE = "arrivals/s"


def answers_at(rate: float, probes: Sequence[StageResult]) -> list[Sample]:
    """What was measured at a rate, over all of its probes."""
    own = [probe for probe in probes if probe.run.stage.rate == rate]
    return [sample for probe in own for sample in probe.run.samples if sample.is_ok and not sample.is_warmup]


def sweep_charts(verdicts: Sequence[RateVerdict], probes: Sequence[StageResult], percentile: float) -> list[Chart]:
    """Attainment, TTFT and TPOT by rate.

    Args:
        verdicts: at least one, in any order.
        percentile: of the requests that must keep the SLO, such as 90.
    """
    ordered = sorted(verdicts, key=lambda verdict: verdict.rate)
    rates = np.array([verdict.rate for verdict in ordered], dtype=np.float64)
    answers = [answers_at(verdict.rate, probes) for verdict in ordered]
    is_wide = bool(rates[-1] > WIDE_RATIO * rates[0])

    def line(name: str, values: Sequence[float]) -> Series:
        return Series(name, rates, np.array(values, dtype=np.float64))

    def latency(name: str, value: Callable[[Sample], float | None]) -> Chart:
        ranks = dict.fromkeys((_MEDIAN, percentile))
        lines = [line(f"p{rank:g}", [_percentile_ms(map(value, own), rank) for own in answers]) for rank in ranks]
        return Chart(f"{name} by rate", _RATE, f"{name} (ms)", lines, is_log_x=is_wide)

    attainment = [
        line("in time", [verdict.attainment for verdict in ordered]),
        line("95 %, low", [verdict.interval[0] for verdict in ordered]),
        line("95 %, high", [verdict.interval[1] for verdict in ordered]),
        line("must be", [verdict.goal for verdict in ordered]),
    ]
    return [
        Chart("Attainment by rate", _RATE, "share of requests", attainment, is_log_x=is_wide),
        latency("TTFT", lambda sample: sample.ttft_s(from_send=False)),
        latency("TPOT", Sample.tpot_s),
    ]


def _percentile_ms(values: Iterable[float | None], rank: float) -> float:
    """A gap in the line where nothing was answered: zero would be the best of all."""
    known = [value for value in values if value is not None]
    return percentile_ms(known, rank) if known else nan
