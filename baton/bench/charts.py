"""The charts of a report, as data: the PNG and the HTML page draw the same ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from baton.bench.latency import PERCENTILES
from baton.bench.sample import Sample
from baton.bench.stage_result import StageResult

_MAX_POINTS = 1000
_MAX_BINS = 120
_MIN_BIN_S = 0.5
_MAX_MOMENTS = 500
WIDE_RATIO = 30
"""Ratio from which a linear axis would hide the lower values."""


@dataclass(frozen=True, slots=True)
class Series:
    """A line of a chart. ``is_dotted`` draws points without a line."""

    name: str
    x: NDArray[np.float64]
    y: NDArray[np.float64]
    is_dotted: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """Axes with their units, and what is drawn between them. ``has_whole_x``: nothing lies between whole numbers."""

    title: str
    x_label: str
    y_label: str
    series: list[Series]
    is_log_x: bool = False
    has_whole_x: bool = False


def make_charts(stages: Sequence[StageResult]) -> list[Chart]:
    """Distributions of latencies, their course and that of the throughput, and the stages side by side."""
    charts = [
        _cdf(stages, "TTFT", lambda sample: sample.ttft_s(from_send=False)),
        _cdf(stages, "TPOT", Sample.tpot_s),
        _cdf(stages, "E2E", lambda sample: sample.e2e_s(from_send=False)),
        _ttft_over_time(stages),
        _throughput_over_time(stages),
        _in_flight_over_time(stages),
    ]
    return [*charts, *_stage_charts(stages)] if len(stages) > 1 else charts


def _measured(stage: StageResult) -> list[Sample]:
    return [sample for sample in stage.run.samples if sample.is_ok and not sample.is_warmup]


def _cdf(stages: Sequence[StageResult], name: str, value: Callable[[Sample], float | None]) -> Chart:
    series = []
    for stage in stages:
        values = np.sort([1000.0 * v for sample in _measured(stage) if (v := value(sample)) is not None])
        if values.size:
            shares = np.arange(1, values.size + 1) / values.size
            kept = _thinned(values.size)
            series.append(Series(stage.label, values[kept], shares[kept]))
    lows, highs = [one.x[0] for one in series], [one.x[-1] for one in series]
    is_wide = bool(series) and min(lows) > 0 and max(highs) > WIDE_RATIO * min(lows)
    return Chart(f"{name}, distribution", f"{name} (ms)", "share of answers", series, is_log_x=is_wide)


def _ttft_over_time(stages: Sequence[StageResult]) -> Chart:
    series = []
    for stage in stages:
        samples = _measured(stage)
        points = [(s.intended_s, 1000.0 * v) for s in samples if (v := s.ttft_s(from_send=False)) is not None]
        if points:
            array = np.array(points, dtype=np.float64)[_thinned(len(points))]
            series.append(Series(stage.label, array[:, 0], array[:, 1], is_dotted=True))
    return Chart("TTFT over time", "due, seconds into the stage", "TTFT (ms)", series)


def _throughput_over_time(stages: Sequence[StageResult]) -> Chart:
    series = []
    for stage in stages:
        times, tokens = _token_times(stage.run.samples)
        if times.size:
            edges = _edges(float(times.max()))
            counts, _ = np.histogram(times, edges, weights=tokens)
            series.append(Series(stage.label, (edges[:-1] + edges[1:]) / 2, counts / np.diff(edges)))
    return Chart("Output tokens over time", "seconds into the stage", "tokens/s", series)


def _in_flight_over_time(stages: Sequence[StageResult]) -> Chart:
    """Requests that are due and have no answer yet: a queue that grows shows here first."""
    series = []
    for stage in stages:
        samples = stage.run.samples
        last_s = max([stage.window.end_s, *(s.finished_s or 0.0 for s in samples)])
        starts = np.sort([s.intended_s for s in samples])
        ends = np.sort([last_s if s.finished_s is None else s.finished_s for s in samples])
        moments = np.linspace(0.0, last_s, _MAX_MOMENTS)
        open_at = np.searchsorted(starts, moments, "right") - np.searchsorted(ends, moments, "right")
        series.append(Series(stage.label, moments, open_at.astype(np.float64)))
    return Chart("Requests due and not answered", "seconds into the stage", "requests", series)


def _stage_charts(stages: Sequence[StageResult]) -> list[Chart]:
    load = np.array([stage.run.stage.rate or stage.run.stage.concurrency for stage in stages], dtype=np.float64)
    is_open = stages[0].run.stage.is_open
    x_label = "arrivals/s" if is_open else "requests at once"

    def line(name: str, values: Sequence[float]) -> Series:
        return Series(name, load, np.array(values, dtype=np.float64))

    throughput = [line("output tokens/s", [stage.output_tokens_per_s for stage in stages])]
    charts = [Chart("Throughput by load", x_label, "tokens/s", throughput, has_whole_x=not is_open)]
    for key, name in (("ttft_ms", "TTFT"), ("tpot_ms", "TPOT")):
        summaries = [stage.latencies[key] for stage in stages]
        lines = [line(f"p{rank}", [getattr(summary, f"p{rank}") for summary in summaries]) for rank in PERCENTILES]
        charts.append(Chart(f"{name} by load", x_label, f"{name} (ms)", lines, has_whole_x=not is_open))
    return charts


def _token_times(samples: Sequence[Sample]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """When chunks came, and how many tokens each stands for."""
    times = [np.array(sample.chunk_times_s, dtype=np.float64) for sample in samples]
    tokens = [
        np.full(len(moments), (sample.output_tokens or len(moments)) / max(1, len(moments)))
        for sample, moments in zip(samples, times, strict=True)
    ]
    return np.concatenate([np.empty(0), *times]), np.concatenate([np.empty(0), *tokens])


def _edges(last_s: float) -> NDArray[np.float64]:
    width = max(_MIN_BIN_S, last_s / _MAX_BINS)
    return np.arange(0.0, last_s + width, width)


def _thinned(size: int) -> NDArray[np.int64]:
    """At most so many indices as a picture can show, the first and the last among them."""
    return np.unique(np.linspace(0, size - 1, min(size, _MAX_POINTS)).round().astype(np.int64))
