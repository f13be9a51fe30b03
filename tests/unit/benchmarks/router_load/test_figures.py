"""Figures from figures: what is subtracted from what, medians of runs."""

from __future__ import annotations

import pytest

from baton.bench.latency import Summary
from baton.core.errors import ConfigError
from baton.core.timeline import Event
from benchmarks.router_load.__main__ import parse_sizes
from benchmarks.router_load.figures import added_latency, median_figures, stage_summaries


def test_upper_percentiles_are_not_reduced_by_slow_moments_of_the_workers():
    through = Summary.of_seconds([0.003] * 98 + [0.050] * 2)
    directly = Summary.of_seconds([0.001] * 90 + [0.040] * 10)
    added = added_latency(through, directly)
    assert added["p50"] == pytest.approx(2.0)
    assert added["p99"] == pytest.approx(49.0)


def test_medians_are_nested_and_keep_values_that_are_not_numbers():
    runs = [{"name": "1+1", "ms": {"p50": value}, "rss": [value, 2 * value]} for value in (1.0, 5.0, 2.0)]
    assert median_figures(runs) == {"name": "1+1", "ms": {"p50": 2.0}, "rss": [2.0, 4.0]}


def test_stages_omit_requests_without_an_end():
    whole = {Event.PARSED: 1.0, Event.TOKENIZED: 1.5}
    summaries = stage_summaries([whole, {Event.PARSED: 3.0}])
    assert summaries["checks and tokenizing"]["count"] == 1
    assert summaries["checks and tokenizing"]["p50"] == pytest.approx(0.5)
    assert summaries["answer"]["count"] == 0


def test_sizes_are_parsed_and_invalid_ones_refused():
    assert parse_sizes("--sizes", "1+1, 16+48") == ((1, 1), (16, 48))
    for text in ("", "1", "0+1", "1+1,", "a+b"):
        with pytest.raises(ConfigError, match="--sizes"):
            parse_sizes("--sizes", text)
