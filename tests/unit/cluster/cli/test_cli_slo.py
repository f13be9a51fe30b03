"""SLO classes in ``baton status`` and ``baton explain``."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from cluster.cli.cli_slo import queue_sentence, slo_sentence, slo_table

TARGETS = {"slo_class": "interactive", "slo_ttft_target_ms": 1000.0, "slo_tpot_target_ms": 50.0}


def window(requests: int, attainment: float | None, goodput: float) -> dict[str, Any]:
    return {"requests": requests, "attainment": attainment, "goodput_per_s": goodput}


STATUS = {
    "interactive": {
        "ttft_target_ms": 1000.0, "tpot_target_ms": 50.0, "percentile": 95.0,
        "windows": {"1m": window(0, None, 0.0), "5m": window(40, 0.975, 0.13), "1h": window(4000, 0.9333, 123.4)},
    },
    "a-name-of-thirty-two-characters1": {
        "ttft_target_ms": 60_000.0, "tpot_target_ms": 2.5, "percentile": 99.95,
        "windows": {name: window(1, 1.0, 1234.5678) for name in ("1m", "5m", "1h")},
    },
}  # fmt: skip


def test_the_table_has_targets_attainment_and_goodput() -> None:
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(slo_table(STATUS))
    rows = [" ".join(line.split()) for line in console.export_text().splitlines()]
    assert "interactive 1 s 50 ms 95 % - 97.5 % 93.33 % - 0.13 123" in rows
    assert rows[1] == "class TTFT TPOT goal 1m 5m 1h 1m 5m 1h"


def test_on_80_columns_every_figure_is_whole_and_only_long_names_wrap() -> None:
    busy = {name: window(4000, 0.93333, rate) for name, rate in (("1m", 0.083333), ("5m", 1234.5678), ("1h", 1 / 3600))}
    slow = {"ttft_target_ms": 3_600_000.0, "tpot_target_ms": 33.333, "percentile": 99.95, "windows": busy}
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(slo_table({**STATUS, "low-latency-video": slow}, is_narrow=True))
    lines = console.export_text().splitlines()
    assert not [line for line in lines if "…" in line or len(line.rstrip()) > 80]
    rows = [" ".join(line.split()) for line in lines]
    assert rows[:2] == ["SLO goal met % goodput/s", "class TTFT TPOT % 1m 5m 1h 1m 5m 1h"]
    assert "interactive 1 s 50 ms 95 - 97.5 93.33 - 0.13 123" in rows
    assert "low-latency-video 3600 s 33.3 ms 99.95 93.33 93.33 93.33 0.0833 1235 0.0003" in rows
    name = next(index for index, row in enumerate(rows) if row.startswith("a-name"))
    assert rows[name].split()[0] + rows[name + 1] == "a-name-of-thirty-two-characters1"


@pytest.mark.parametrize(
    ("attributes", "sentence"),
    [
        ({}, "SLO class interactive: TTFT of 1 s; TPOT of 50 ms"),
        (
            {"slo_result": "met", "slo_ttft_margin_ms": 680.0, "slo_tpot_margin_ms": 9.5},
            "SLO class interactive met: TTFT 320 ms, 680 ms under the target of 1 s; "
            "TPOT 40.5 ms, 9.5 ms under the target of 50 ms",
        ),
        (
            {"slo_result": "missed_ttft", "slo_ttft_margin_ms": -250.0},
            "SLO class interactive missed: TTFT 1.25 s, 250 ms over the target of 1 s; TPOT of 50 ms",
        ),
        ({"slo_result": "rejected"}, "SLO class interactive missed: the request was refused"),
        ({"slo_result": "failed"}, "SLO class interactive missed: the request failed"),
        (
            {"slo_result": "excluded"},
            "SLO class interactive: not counted, because the request was cancelled or invalid",
        ),
    ],
)
def test_a_request_shows_whether_and_by_how_much_it_met_its_targets(attributes, sentence):
    assert slo_sentence({**TARGETS, **attributes}) == sentence


def test_only_classes_with_waiting_requests_are_named() -> None:
    admission = {"interactive": {"queued": 0}, "standard": {"queued": 12}, "batch": {"queued": 3}}
    assert queue_sentence(admission) == "Queued in the router: 12 standard, 3 batch."
    assert queue_sentence({"interactive": {"queued": 0}}) is None
    assert queue_sentence({}) is None


def test_a_timeline_of_an_older_router_names_no_class() -> None:
    assert slo_sentence({"outcome": "stop"}) is None
