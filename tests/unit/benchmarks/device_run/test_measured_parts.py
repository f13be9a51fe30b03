"""Measuring parts: a failure costs only its own measurement, and host work does not count as device time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baton.engine.attention.key_sharing import UNDIVIDED
from benchmarks.device_run import drafts_part, others_part, steps_part, tiles_part, timing
from benchmarks.device_run.part import Row, Setting, device_named
from benchmarks.device_run.random_steps import StepTimer, StepTimes
from benchmarks.device_run.timing import kernel_rows
from benchmarks.engine_steps import Case

SETTING = Setting(torch.device("cpu"), "tiny")


def test_a_step_out_of_memory_costs_only_its_own_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    lone, longest = Case(1, 1, 32), Case(1, 64, 0)

    def times(self: StepTimer, case: Case) -> StepTimes:
        if case in (lone, longest):
            raise torch.OutOfMemoryError("too long")
        return StepTimes(2.0, 1.0, None, 2.0, None)

    monkeypatch.setattr(StepTimer, "times", times)
    monkeypatch.setattr(steps_part, "kernel_rows", lambda *_: iter(()))
    monkeypatch.setattr(steps_part, "_short_plans", lambda *_: iter(()))
    rows = list(steps_part.run(SETTING))
    assert {row["name"]: row["error"] for row in rows if "error" in row} == {
        case.name: "OutOfMemoryError: too long" for case in (lone, longest)
    }
    assert [row["name"] for row in rows if "met" in row] == [
        "decode, batch 3, context 32: share of the bandwidth",
        "prefill 48: share of the matrix rate",
    ]


@pytest.mark.parametrize(
    ("part", "failing", "going_on"),
    [(others_part, "_COMPARISONS", "transformers"), (drafts_part, "_CHECKS", "drafting")],
)
def test_a_failed_measurement_does_not_stop_the_next(
    part: Any, failing: str, going_on: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(setting: Setting) -> Iterator[Row]:
        yield {"name": "before"}
        raise RuntimeError("not supported")

    def measures(setting: Setting) -> Iterator[Row]:
        yield {"name": "measured"}

    checks = dict.fromkeys(getattr(part, failing), fails) | {going_on: measures}
    monkeypatch.setattr(part, failing, checks)
    rows = list(part.run(SETTING))
    assert sum(row.get("error") == "RuntimeError: not supported" for row in rows) == len(checks) - 1
    assert rows.count({"name": "measured"}) == 1


def test_a_failed_layout_does_not_stop_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    backends = iter(range(100))

    class Attends:
        key_sharing = UNDIVIDED

        def __init__(self, cache: Any, **layout: Any) -> None:
            self.number = next(backends)

        def forward(self, layer: int, query: torch.Tensor, *_: Any) -> torch.Tensor:
            if self.number == 1:
                raise RuntimeError("PTXAS error")
            if self.number == 2:
                raise RuntimeError("PassManager::run failed")
            return query * (2.0 if self.number == 4 else 1.0)

    monkeypatch.setattr("baton.engine.attention.triton_paged.TritonPaged", Attends)
    broken, too_large, wrong, right = tiles_part.run(SETTING)
    assert (broken["ok"], broken["error"]) == (False, "RuntimeError: PTXAS error")
    assert too_large["note"] == "RuntimeError: PassManager::run failed"
    assert "ok" not in too_large
    assert wrong["ok"] is False
    assert right["ms"] > 0
    assert "ok" not in right


def test_only_operations_with_device_time_count_as_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def profile(activities: Any) -> Iterator[Any]:
        events = [("cudaLaunchKernel", 9, 0.0), ("attend", 4, 30.0), ("gemm", 5, 90.0)]
        averages = [SimpleNamespace(key=key, count=count, self_device_time_total=us) for key, count, us in events]
        yield SimpleNamespace(key_averages=lambda: averages)

    monkeypatch.setattr(timing, "profile", profile)
    monkeypatch.setattr(timing, "synchronize", lambda device: None)
    rows = [dict(row) for row in kernel_rows(lambda: None, "a step", device_named("cuda"))]
    assert rows == [
        {"name": "kernels of a step", "count": 9, "us": 120.0, "share": 1.0},
        {"name": "  gemm", "count": 5, "us": 90.0, "share": 0.75},
        {"name": "  attend", "count": 4, "us": 30.0, "share": 0.25},
    ]
