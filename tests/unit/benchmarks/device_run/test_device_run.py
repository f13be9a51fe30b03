"""A device run keeps every result and goes on, whatever its parts do."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
import torch._dynamo
from rich.console import Console

import baton.engine.models.model_loader
from benchmarks.device_run import __main__ as command
from benchmarks.device_run.part import PARTS, Part, Row, Run, Setting, device_named
from tests.unit.benchmarks.device_run.report_rows import names, rows_of, statuses

SHARED = (torch._dynamo, baton.engine.models.model_loader)
"""Imported once, before processes are forked."""


class FakePart(Part):
    """Runs a function of this file."""

    def __init__(self, function: Run, limit_s: float = 10, needs: tuple[str, ...] = ()) -> None:
        super().__init__(function.__name__, limit_s, f"the part {function.__name__}", "", needs)
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


def hang() -> None:
    time.sleep(600)


def hanging(setting: Setting) -> Iterator[Row]:
    child = subprocess.Popen(["sleep", "600"])
    yield {"name": "before", "child": child.pid}
    threading.Thread(target=hang).start()
    threading.Event().wait()


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
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}

    def launch(*parts: Part, options: tuple[str, ...] = ()) -> int:
        return command.main(["--out", str(tmp_path), "--device", "cpu", "--shape", "tiny", *options], parts)

    yield launch
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_successful_parts_pass(launch: Launch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_every_outcome_of_a_part_lets_the_next_one_run(
    launch: Launch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = [FakePart(wrong), FakePart(raising), FakePart(hanging, 1.5), FakePart(killed), FakePart(silent)]
    assert launch(*parts, FakePart(good)) == 1
    assert statuses(tmp_path) == {
        "machine": "passed",
        "wrong": "failed",
        "raising": "failed",
        "hanging": "killed at its limit of 1.5 s",
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
    assert said.index("thread in hang,") < said.index("thread in hanging,"), "the thread that does not wait is first"


def test_an_interrupted_run_reports_every_finished_part(
    launch: Launch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = set(psutil.Process().children())
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
    assert set(psutil.Process().children()) <= before, "nothing that it started lives on"


def machine(setting: Setting) -> Iterator[Row]:
    yield {"name": "a machine", "cpus": 1}


def test_parts_beyond_the_budget_are_reported_as_not_run(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.device_run.launch.MACHINE", FakePart(machine))
    monkeypatch.setattr("benchmarks.device_run.launch._MIN_S", 0.1)
    assert launch(FakePart(hanging, 60), FakePart(good), options=("--budget", "5")) == 1
    assert statuses(tmp_path)["hanging"].startswith("killed at its limit of ")
    assert statuses(tmp_path)["good"] == "not run: no budget left"


def test_a_part_runs_after_those_it_needs(launch: Launch, tmp_path: Path) -> None:
    needing = FakePart(printing, needs=("good",))
    assert launch(FakePart(good), FakePart(wrong), needing, options=("--only", "printing")) == 0
    assert list(statuses(tmp_path)) == ["machine", "good", "printing"]


def test_a_second_run_appends_rows_with_its_own_id(launch: Launch, tmp_path: Path) -> None:
    parts = [FakePart(good), FakePart(wrong)]
    launch(*parts, options=("--only", "good"))
    launch(*parts, options=("--only", "good", "--only", "wrong"))
    runs = list(dict.fromkeys(row["run"] for row in rows_of(tmp_path)))
    assert len(runs) == 2
    assert [row["part"] for row in rows_of(tmp_path) if row["run"] == runs[0] and "status" in row] == [
        "machine",
        "good",
    ]
    assert sum((row["run"], row["part"]) == (runs[1], "wrong") for row in rows_of(tmp_path)) == 3


def ended_by_a_real_time_signal(setting: Setting) -> Iterator[Row]:
    yield {"name": "before"}
    os.kill(os.getpid(), signal.SIGRTMIN + 6)


def exiting(setting: Setting) -> Iterator[Row]:
    yield {"name": "before"}
    sys.exit(0)


def gone(setting: Setting) -> Iterator[Row]:
    yield {"name": "before"}
    os._exit(0)


def test_a_part_that_ends_early_does_not_pass(launch: Launch, tmp_path: Path) -> None:
    parts = [FakePart(ended_by_a_real_time_signal), FakePart(exiting), FakePart(gone), FakePart(good)]
    assert launch(*parts) == 1
    assert statuses(tmp_path) == {
        "machine": "passed",
        "ended_by_a_real_time_signal": f"killed by signal {signal.SIGRTMIN + 6}",
        "exiting": "failed",
        "gone": "exited with status 0",
        "good": "passed",
    }


def impossible(setting: Setting) -> Iterator[Row]:
    yield {"name": "a", "not_run": "needs CUDA"}


def partly(setting: Setting) -> Iterator[Row]:
    yield {"name": "a", "not_run": "needs CUDA"}
    yield {"name": "b", "met": False}


def test_a_part_that_checks_nothing_does_not_pass(
    launch: Launch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(FakePart(impossible), FakePart(partly)) == 0
    assert statuses(tmp_path) == {"machine": "passed", "impossible": "not run here: needs CUDA", "partly": "passed"}
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["impossible", "not", "run", "here:", "needs", "CUDA", "0.0", "0", "0", "1", "0"] in [
        [*line[:6], "0.0", *line[7:]] for line in lines
    ]
    assert ["1", "0", "1", "1"] in [line[-4:] for line in lines if line[:2] == ["partly", "passed"]]


def hanging_up(setting: Setting) -> Iterator[Row]:
    os.kill(os.getppid(), signal.SIGHUP)
    yield {"name": "after"}


@pytest.mark.parametrize("error", [SystemExit(1), OSError(28, "No space left on device")])
def test_a_run_continues_without_a_terminal(
    error: BaseException,
    launch: Launch,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Rich exits where standard output is a closed pipe."""

    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(Console, "print", fails)
    assert launch(FakePart(hanging_up), FakePart(good)) == 0
    assert statuses(tmp_path) == dict.fromkeys(("machine", "hanging_up", "good"), "passed")
    assert capsys.readouterr().err.count("Tables cannot be printed") == 1


def test_a_full_disk_does_not_end_a_run(launch: Launch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "report.jsonl").symlink_to("/dev/full")
    assert launch(FakePart(printing), FakePart(raising), FakePart(good)) == 1
    said = capsys.readouterr()
    assert said.err.count("No space left on device") == 1
    assert "the device is gone" in said.out
    assert [line.split()[:2] for line in said.out.splitlines() if line.startswith(("printing", "good"))] == [
        ["printing", "passed"],
        ["good", "passed"],
    ]


@pytest.mark.parametrize("kind", ["empty", "file", "report is a folder"])
def test_a_folder_that_cannot_hold_the_report_is_refused(
    kind: str, launch: Launch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = {"empty": "", "file": str(tmp_path / "file"), "report is a folder": str(tmp_path)}[kind]
    (tmp_path / "file").touch()
    (tmp_path / "report.jsonl").mkdir()
    with pytest.raises(SystemExit) as refused:
        launch(FakePart(good), options=("--out", out))
    assert refused.value.code == 2
    assert "argument --out: " in capsys.readouterr().err.splitlines()[-1]


IS_FORKED = False
"""Set by a test; a process that is started afresh imports this module anew, and finds it unset."""


def fails_when_forked(setting: Setting) -> Iterator[Row]:
    if IS_FORKED:
        raise RuntimeError("CUDA does not survive a fork")
    yield {"name": "a card", "cpus": 1}


class CudaMachine(Part):
    """Can be sent to a process that is started afresh."""

    def load(self) -> Run:
        return fails_when_forked


@pytest.mark.thorough(covered_by="test_without_the_device_no_other_part_runs")
def test_parts_start_in_fresh_processes_if_forked_ones_cannot_use_the_gpu(
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


def test_without_the_device_no_other_part_runs(launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: fork)  # a fresh process takes seconds to start
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert launch(FakePart(good), options=("--device", "cuda")) == 1
    assert statuses(tmp_path) == {"machine": "failed", "good": "not run: no device"}


def test_the_limits_fit_the_default_budget() -> None:
    assert sum(part.limit_s for part in PARTS) <= 480
    assert len({part.name for part in PARTS}) == len(PARTS)


def test_torch_limits_the_gpu_memory_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses a GPU without a number, and so do other functions of ``torch.cuda``."""
    limits: list[tuple[float, int]] = []
    monkeypatch.setattr("torch.cuda.memory._lazy_init", lambda: None)
    monkeypatch.setattr(
        torch._C, "_cuda_setMemoryFraction", lambda share, device: limits.append((share, device)), raising=False
    )
    torch.cuda.set_per_process_memory_fraction(0.5, device_named("cuda"))
    assert limits == [(0.5, 0)]
