"""The report of a device run: whole lines of JSON whatever the disk does, ends of logs, and tables."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path

import numpy
import psutil
import pytest
import torch
import torch._dynamo
from rich.console import Console

from benchmarks.device_run.report import Report
from benchmarks.device_run.tables import show_part
from tests.unit.benchmarks.device_run.report_rows import names


def test_a_row_after_a_truncated_line_starts_a_new_line(tmp_path: Path) -> None:
    report = Report(tmp_path, "r", "cpu")
    report.add("a", {"name": "first"})
    with report.path.open("a") as file:
        file.write('{"half')
    report.add("a", {"name": "second", "part": "no row says which part it is of"})
    assert names(tmp_path, "a") == ["first", "second"]


def test_rows_that_were_not_fully_written_are_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = Report(tmp_path, "r", "cpu")
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda file, data: write(file, data[:7]))
        report.add("a", {"name": "in pieces"})
    with monkeypatch.context() as patch:

        def fill(file: int, data: bytes) -> int:
            if len(data) < 20:
                raise OSError(28, "No space left on device")
            return write(file, data[:-10])

        patch.setattr(os, "write", fill)
        report.add("a", {"name": "cut"})
    assert report.problem is not None
    report.add("a", {"name": "last"})
    assert report.problem is None
    assert names(tmp_path, "a") == ["in pieces", "cut", "last"]


def test_only_the_end_of_a_log_is_read(tmp_path: Path) -> None:
    report = Report(tmp_path, "r", "cpu")
    with report.log_path.open("wb") as log:
        log.write(b"first\nsecond\n")
        assert log.flush() or report.log_tail(6, 5) == ["second"]
        log.truncate(2**40)  # takes no space
        log.seek(0, os.SEEK_END)
        log.write(b"\nbefore\nlast\n")
    assert report.log_tail(0, 2) == ["before", "last"]
    assert report.log_tail(report.log_size(), 2) == []
    assert report.log_tail(report.log_size() + 1, 2) == []


def test_a_log_without_a_complete_line_has_no_last_lines(tmp_path: Path) -> None:
    report = Report(tmp_path, "r", "cpu")
    report.log_path.symlink_to("/dev/full")
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + 2**30, limits[1]))
    try:
        assert report.log_tail(report.log_size(), 5) == []
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def test_the_report_is_json(tmp_path: Path) -> None:
    report = Report(tmp_path, "r", "cpu")
    figures = {"ms": float("nan"), "worst": numpy.float32("inf"), "ok": numpy.bool_(False), "mean": numpy.float32(1.5)}
    report.add("a", {"name": "a", **figures, "all": [float("-inf"), torch.tensor(2)]})

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    row = json.loads(report.path.read_text(), parse_constant=refuse)
    assert row == report.rows()[0]
    assert (row["ms"], row["worst"], row["ok"], row["mean"], row["all"]) == (None, None, False, 1.5, [None, 2])


def test_rows_of_the_same_figures_share_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"name": "first", "ms": 1.5}, {"name": "other", "share": 0.5}, {"name": "second", "ms": 2.5}]
    show_part(Console(width=80), "a part", "passed", rows)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert lines == [["ms"], ["first", "1.5"], ["second", "2.5"], ["share"], ["other", "0.5"]]
