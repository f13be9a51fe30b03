"""A device run keeps every result and goes on, whatever its parts do."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch._dynamo
from rich.console import Console

import engine.model_loader
from benchmarks.device_run import __main__ as command
from benchmarks.device_run.part import PARTS, Part, Row, Run, Setting, device_named
from benchmarks.device_run.report import Report
from benchmarks.device_run.tables import show_part

SHARED = (torch._dynamo, engine.model_loader)
"""Imported once, before processes are forked."""


class FakePart(Part):
    """Runs a function of this file."""

    def __init__(self, function: Run, limit_s: float = 10) -> None:
        super().__init__(function.__name__, limit_s, f"the part {function.__name__}", "")
        object.__setattr__(self, "function", function)

    def load(self) -> Run:
        return self.function  # type: ignore[attr-defined, no-any-return]


def good(setting: Setting) -> Iterator[Row]:
    yield {"name": "a", "ms": 1.5}
    yield {"name": "b", "ok": True}


def wrong(setting: Setting) -> Iterator[Row]:
    yield {"name": "a", "ok": False}
    yield {"name": "b", "ok": True}


def raising(setting: Setting) -> Iterator[Row]:
    yield {"name": "before"}
    raise RuntimeError("the device is gone")


def hanging(setting: Setting) -> Iterator[Row]:
    child = subprocess.Popen(["sleep", "600"])
    yield {"name": "before", "child": child.pid}
    time.sleep(600)


def killed(setting: Setting) -> Iterator[Row]:
    yield {"name": "before"}
    report = Path(os.environ["DEVICE_RUN_REPORT"])
    with report.open("a") as file:
        file.write('{"run": "x", "part": "killed", "na')
    os.kill(os.getpid(), signal.SIGKILL)


def silent(setting: Setting) -> Iterator[Row]:
    yield from ()


def stopped(setting: Setting) -> Iterator[Row]:
    yield {"name": "before"}
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(600)


def printing(setting: Setting) -> Iterator[Row]:
    os.write(1, b"from the part\n")
    yield {"name": "a"}


Launch = Callable[..., int]


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launch]:
    monkeypatch.setenv("DEVICE_RUN_REPORT", str(tmp_path / "report.jsonl"))
    monkeypatch.setattr(command, "prepare_process", lambda device: None)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def launch(*parts: Part, options: tuple[str, ...] = ()) -> int:
        return command.main(["--out", str(tmp_path), "--device", "cpu", "--shape", "tiny", *options], parts)

    yield launch
    for number, handler in handlers.items():
        signal.signal(number, handler)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    rows = []
    for line in (folder / "report.jsonl").read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def statuses(folder: Path) -> dict[str, str]:
    return {row["part"]: row["status"] for row in rows_of(folder) if "status" in row}


def names(folder: Path, part: str) -> list[str]:
    return [row["name"] for row in rows_of(folder) if row["part"] == part and "name" in row]


def test_good_parts_pass(launch: Launch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(FakePart(good), FakePart(printing)) == 0
    assert statuses(tmp_path) == {"machine": "passed", "good": "passed", "printing": "passed"}
    assert names(tmp_path, "good") == ["a", "b"]
    assert all({"run", "part", "device", "at"} <= row.keys() for row in rows_of(tmp_path))
    assert {row["device"] for row in rows_of(tmp_path) if row["part"] == "good"} == {"cpu"}
    said = capsys.readouterr().out
    assert "torch" in said.partition("the part good")[0], "the report begins with the machine"
    assert "1.5" in said
    assert "from the part" not in said
    assert "from the part" in (tmp_path / "log.txt").read_text()
    assert max(map(len, said.splitlines())) <= 120


def test_whatever_a_part_does_the_next_one_runs(
    launch: Launch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = [FakePart(wrong), FakePart(raising), FakePart(hanging, 1.5), FakePart(killed), FakePart(silent)]
    assert launch(*parts, FakePart(good)) == 1
    assert statuses(tmp_path) == {
        "machine": "passed",
        "wrong": "failed",
        "raising": "failed",
        "hanging": "killed at its limit of 2 s",
        "killed": "killed by SIGKILL",
        "silent": "failed",
        "good": "passed",
    }
    assert names(tmp_path, "raising") == ["before", "failure"]
    assert names(tmp_path, "killed") == ["before"]
    assert names(tmp_path, "good") == ["a", "b"]
    rows = rows_of(tmp_path)
    (failure,) = (row for row in rows if row["part"] == "raising" and row.get("name") == "failure")
    assert failure["error"] == "RuntimeError: the device is gone"
    child = next(row["child"] for row in rows if "child" in row)
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
    (hung,) = (row for row in rows if row["part"] == "hanging" and "status" in row)
    assert any("in hanging" in line for line in hung["log"]), "the stack of what hung is in the report"
    said = capsys.readouterr().out
    assert "the device is gone" in said
    assert "WRONG" in said


def test_stopped_halfway_the_report_holds_every_finished_part(
    launch: Launch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(FakePart(good), FakePart(stopped), FakePart(wrong)) == 1
    assert names(tmp_path, "good") == ["a", "b"]
    assert names(tmp_path, "stopped") == ["before"]
    assert statuses(tmp_path) == {
        "machine": "passed",
        "good": "passed",
        "stopped": "stopped by SIGTERM",
        "wrong": "not run: stopped by SIGTERM",
    }
    said = capsys.readouterr().out
    assert "before" in said
    assert "not run: stopped by SIGTERM" in said
    assert not psutil.Process().children(), "nothing that it started lives on"


def machine(setting: Setting) -> Iterator[Row]:
    yield {"name": "a machine", "cpus": 1}


def test_parts_beyond_the_budget_are_reported_as_not_run(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.device_run.launch.MACHINE", FakePart(machine))
    monkeypatch.setattr("benchmarks.device_run.launch._LEAST_S", 0.1)
    assert launch(FakePart(hanging, 60), FakePart(good), options=("--budget", "5")) == 1
    assert statuses(tmp_path)["hanging"].startswith("killed at its limit of ")
    assert statuses(tmp_path)["good"] == "not run: no budget left"


def test_a_second_run_appends_rows_with_an_id_of_its_own(launch: Launch, tmp_path: Path) -> None:
    parts = [FakePart(good), FakePart(wrong)]
    launch(*parts, options=("--only", "good"))
    launch(*parts, options=("--only", "good", "--only", "wrong"))
    runs = list(dict.fromkeys(row["run"] for row in rows_of(tmp_path)))
    assert len(runs) == 2
    assert [row["part"] for row in rows_of(tmp_path) if row["run"] == runs[0] and "status" in row] == [
        "machine",
        "good",
    ]
    assert len(Report(tmp_path, runs[1], "").rows("wrong")) == 3


def test_a_row_after_a_truncated_line_starts_a_new_line(tmp_path: Path) -> None:
    report = Report(tmp_path, "r", "cpu")
    report.add("a", {"name": "first"})
    with report.path.open("a") as file:
        file.write('{"half')
    report.add("a", {"name": "second", "part": "no row says which part it is of"})
    assert [row["name"] for row in report.rows("a")] == ["first", "second"]


IS_FORKED = False
"""Set by a test; a process that is started afresh imports this module anew, and finds it unset."""


def starts_cuda_afresh_only(setting: Setting) -> Iterator[Row]:
    if IS_FORKED:
        raise RuntimeError("CUDA does not survive a fork")
    yield {"name": "a card", "cpus": 1}


class CudaMachine(Part):
    """Can be sent to a process that is started afresh."""

    def load(self) -> Run:
        return starts_cuda_afresh_only


@pytest.mark.thorough
def test_parts_start_afresh_where_forked_processes_cannot_use_the_gpu(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = CudaMachine("machine", 60, "machine", "")
    monkeypatch.setattr("benchmarks.device_run.launch.MACHINE", machine)
    monkeypatch.setattr(f"{__name__}.IS_FORKED", True)
    assert launch(CudaMachine("good", 60, "good", ""), options=("--device", "cuda")) == 0
    assert [(row["part"], row["status"]) for row in rows_of(tmp_path) if "status" in row] == [
        ("machine", "failed"),
        ("machine", "passed"),
        ("good", "passed"),
    ]


def test_without_the_device_nothing_else_is_tried(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: fork)  # a fresh process takes seconds to start
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert launch(FakePart(good), options=("--device", "cuda")) == 1
    assert statuses(tmp_path) == {"machine": "failed", "good": "not run: no device"}


def test_limits_fit_the_default_budget() -> None:
    assert sum(part.limit_s for part in PARTS) <= 480
    assert len({part.name for part in PARTS}) == len(PARTS)


def test_torch_limits_the_memory_of_a_runs_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses a GPU without a number, and so do other functions of ``torch.cuda``."""
    limits: list[tuple[float, int]] = []
    monkeypatch.setattr("torch.cuda.memory._lazy_init", lambda: None)
    monkeypatch.setattr(
        torch._C, "_cuda_setMemoryFraction", lambda share, device: limits.append((share, device)), raising=False
    )
    torch.cuda.set_per_process_memory_fraction(0.5, device_named("cuda"))
    assert limits == [(0.5, 0)]


def test_rows_of_the_same_figures_share_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"name": "first", "ms": 1.5}, {"name": "other", "share": 0.5}, {"name": "second", "ms": 2.5}]
    show_part(Console(width=80), "a part", "passed", rows)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert lines == [["ms"], ["first", "1.5"], ["second", "2.5"], ["share"], ["other", "0.5"]]
