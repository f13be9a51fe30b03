"""A sweep's charts pool the probes of each rate, in the order of the rates."""

from __future__ import annotations

import numpy as np
import pytest

from baton.bench.goodput_search import RateVerdict
from baton.bench.runner import StageRun
from baton.bench.sample import Sample
from baton.bench.stage_result import StageResult, evaluate
from baton.bench.stages import Bounds, Stage
from baton.bench.sweep_charts import sweep_charts


def answered(at_s: float, ttft_s: float, gap_s: float) -> Sample:
    sample = Sample(at_s, False, 10, 2, sent_s=at_s, input_tokens=10, output_tokens=2, error=None)
    sample.chunk_times_s.extend((at_s + ttft_s, at_s + ttft_s + gap_s))
    sample.finished_s = sample.chunk_times_s[-1]
    return sample


def probe(rate: float, *ttfts_s: float, gap_s: float = 0.01) -> StageResult:
    run = StageRun(Stage(0, Bounds(), "constant", rate=rate))
    run.samples = [answered(float(index), ttft_s, gap_s) for index, ttft_s in enumerate(ttfts_s)]
    run.samples[0].is_warmup = True
    run.load_start_s, run.load_end_s = 0.0, float(len(ttfts_s))
    return evaluate(run, None)


def test_each_rate_is_a_point_of_all_its_probes() -> None:
    verdicts = [RateVerdict(8.0, 0.9, 30, 60, 2), RateVerdict(1.0, 0.9, 40, 40, 1)]
    probes = [probe(8.0, 9.0, 1.0, 2.0), probe(1.0, 9.0, 0.1, 0.1, gap_s=0.02), probe(8.0, 9.0, 3.0, 4.0)]
    attainment, ttft, tpot = sweep_charts(verdicts, probes, 75.0)
    drawn = {series.name: series for series in attainment.series}
    assert drawn["in time"].x.tolist() == [1.0, 8.0]
    assert drawn["in time"].y.tolist() == [1.0, 0.5]
    assert drawn["must be"].y.tolist() == [0.9, 0.9]
    assert (drawn["95 %, low"].y < drawn["in time"].y).all()
    assert [series.name for series in ttft.series] == ["p50", "p75"]
    assert ttft.series[0].y.tolist() == pytest.approx([100.0, 2500.0])
    assert ttft.series[1].y.tolist() == pytest.approx([100.0, 3250.0])
    assert tpot.series[0].y.tolist() == pytest.approx([20.0, 10.0])
    assert not attainment.is_log_x


def test_the_median_is_drawn_once_and_far_rates_on_a_log_axis() -> None:
    verdicts = [RateVerdict(rate, 0.5, 1, 1, 1) for rate in (0.1, 100.0)]
    charts = sweep_charts(verdicts, [], 50.0)
    assert [series.name for series in charts[1].series] == ["p50"]
    assert np.isnan(charts[1].series[0].y).all(), "where nothing was answered there is a gap"
    assert all(chart.is_log_x for chart in charts)
