"""The few lines that say where the threads of a part hang."""

from __future__ import annotations

import pytest
from rich.console import Console

from benchmarks.device_run.stacks import telling_lines
from benchmarks.device_run.tables import show_part
from benchmarks.device_run.thread_samples import ROOT

LIBRARY = "/usr/lib/python3"
MAIN = [
    "Current thread 0x03 (most recent call first):",
    f'  File "{LIBRARY}/selectors.py", line 468 in select',
    f'  File "{ROOT}/benchmarks/device_run/end_to_end_part.py", line 40 in run',
    f'  File "{ROOT}/benchmarks/device_run/launch.py", line 30 in _run',
]
ENGINE = [
    "Thread 0x02 (most recent call first):",
    f'  File "{LIBRARY}/site-packages/torch/cuda/streams.py", line 9 in synchronize',
    *(f'  File "{ROOT}/baton/engine/loop.py", line {number} in step' for number in range(9)),
    "",
]
IDLE = ["Thread 0x01 (most recent call first):", f'  File "{LIBRARY}/threading.py", line 355 in wait', ""]


def test_every_thread_is_shown_with_the_engine_first() -> None:
    assert telling_lines(["before", *IDLE, *ENGINE, *MAIN]) == [
        "thread in step, baton/engine/loop.py:0",
        "called by step, baton/engine/loop.py:1",
        "called by step, baton/engine/loop.py:2",
        "thread in run, benchmarks/device_run/end_to_end_part.py:40",
        "called by _run, benchmarks/device_run/launch.py:30",
        f"thread in wait, {LIBRARY}/threading.py:355",
    ]


def test_a_crash_shows_its_thread_first() -> None:
    log = ["Fatal Python error: Segmentation fault", "", *ENGINE, *MAIN, "", "Extension modules: numpy (total: 1)"]
    assert telling_lines(log)[:2] == [log[0], "thread in run, benchmarks/device_run/end_to_end_part.py:40"]


def test_many_threads_take_few_lines() -> None:
    assert len(telling_lines(ENGINE * 50)) == 12


def test_the_end_of_a_log_without_stacks_is_shown() -> None:
    assert telling_lines([str(number) for number in range(50)]) == [str(number) for number in range(42, 50)]


def test_a_part_that_failed_and_hung_shows_both(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"name": "a", "ok": False, "error": "wrong numbers"}, {"status": "killed", "log": ENGINE}]
    show_part(Console(width=80), "a part", "killed at its limit of 3 s", rows)
    said = capsys.readouterr().out
    assert "wrong numbers" in said
    assert "thread in step" in said
