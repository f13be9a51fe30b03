"""The benchmark of the start: phases are cut where the command and the worker that was last say so."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from baton.core.errors import WorkerLostError
from benchmarks.startup import OutputLine, Startup, figures_of, phases_of

STARTED = datetime(2026, 1, 1, tzinfo=UTC)
OUTPUT = [
    (1.0, "starting a local Ray cluster"),
    (3.0, "router and workers log to /somewhere"),
    (4.0, "starting the router and the workers; each worker loads the model"),
    (11.0, "decode-1 is ready at 127.0.0.1:1 (cpu)"),
    (12.0, 'ready: baton submit "Hello" --stream    stop: Ctrl-C'),
]


def logged(process: str, *moments_s: float) -> list[dict[str, Any]]:
    messages = ("the process is up", "the model is loaded", "the self-check is passed", "the steps are profiled")
    return [
        {"time": (STARTED + timedelta(seconds=at_s)).isoformat(), "process": process, "message": message}
        for at_s, message in zip(moments_s, messages, strict=True)
    ]


def test_phases_of_the_slowest_worker_add_up() -> None:
    lines = logged("prefill-1", 5.0, 6.0, 7.0, 8.0) + logged("decode-1", 5.5, 8.5, 9.0, 10.0)
    start = phases_of(STARTED, [OutputLine(STARTED + timedelta(seconds=at_s), text) for at_s, text in OUTPUT], lines)
    assert list(start.phases_s.values()) == pytest.approx([1.0, 2.0, 1.0, 1.5, 3.0, 0.5, 1.0, 2.0])
    assert start.total_s == pytest.approx(12.0) == sum(start.phases_s.values())


def test_a_disabled_self_check_is_not_a_phase() -> None:
    lines = [line for line in logged("decode-1", 5.0, 6.0, 7.0, 8.0) if "self-check" not in line["message"]]
    start = phases_of(STARTED, [OutputLine(STARTED + timedelta(seconds=at_s), text) for at_s, text in OUTPUT], lines)
    assert "worker: self-check" not in start.phases_s
    assert sum(start.phases_s.values()) == pytest.approx(12.0)


@pytest.mark.parametrize("missing", [0, 1, 2, 4])
def test_a_start_without_phases_has_none(missing: int) -> None:
    output = [OutputLine(STARTED, text) for index, (_, text) in enumerate(OUTPUT) if index != missing]
    with pytest.raises(WorkerLostError, match="nothing was logged"):
        phases_of(STARTED, output, logged("decode-1", 5.0, 6.0, 7.0, 8.0))


def test_without_logs_of_workers_there_are_no_phases() -> None:
    with pytest.raises(WorkerLostError, match="no worker"):
        phases_of(STARTED, [OutputLine(STARTED, text) for _, text in OUTPUT], [])


def test_figures_are_medians() -> None:
    runs = [Startup(total, {"Ray": total / 2}) for total in (9.0, 30.0, 10.0)]
    assert figures_of(runs) == {"total": 10.0, "Ray": 5.0}
