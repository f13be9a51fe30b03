"""Checks in child processes: one failing check does not stop the others, and the report shows each outcome."""

from __future__ import annotations

import time

import psutil
import pytest
import torch

from benchmarks.device_run.children import Children, run_here
from benchmarks.device_run.part import Setting
from tests import breaking_checks

SETTING = Setting(torch.device("cpu"), "tiny", seed=5)


def test_a_check_that_crashes_its_process_costs_only_itself() -> None:
    names = ["fine", "raises", "fine after it", "breaks the context", "exits"]
    rows = list(Children(breaking_checks.__name__, 1).run(names, SETTING))
    failures = {row["name"]: row["error"] for row in rows if not row["ok"]}
    processes = {row["name"]: row["process"] for row in rows if row["ok"]}
    assert list(processes) == names
    assert all(row["seed"] == SETTING.seed for row in rows if row["ok"])
    assert list(failures) == ["raises", "breaks the context", "exits"]
    assert failures["raises"] == "ValueError: a wrong number"
    assert "CUDA error" in failures["breaks the context"]
    assert "exit status 3" in failures["exits"]
    assert "Segmentation fault" in failures["exits"], "the native stack behind it is left out"
    assert len({processes[name] for name in names[:4]}) == 1
    assert processes["exits"] != processes["breaks the context"]


@pytest.mark.thorough(covered_by="test_the_limit_holds_for_a_wrapped_command")
def test_a_check_that_hangs_costs_only_itself() -> None:
    rows = list(Children(breaking_checks.__name__, 1, limit_s=0.5).run(["hangs", "fine"], SETTING))
    assert [(row["name"], row["ok"]) for row in rows] == [("hangs", True), ("hangs", False), ("fine", True)]
    assert "killed after 0.5 s" in rows[1]["error"]


def test_the_limit_holds_for_a_wrapped_command() -> None:
    """The wrapper's end does not end the check's process, which holds the pipe."""
    wrapper = ("sh", "-c", '"$@"; exit $?', "sh")
    rows = list(Children(breaking_checks.__name__, 1, limit_s=0.5, wrapper=wrapper).run(["answers late"], SETTING))
    assert [row["ok"] for row in rows] == [True, False]
    assert "killed after 0.5 s" in rows[1]["error"]
    while _lives(rows[0]["process"]):
        time.sleep(0.01)


def _lives(process: int) -> bool:
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_no_check_starts_after_begin_s() -> None:
    assert list(Children("json", 2, begin_s=0.0, wrapper=("/no/such/tool",)).run(["one"], SETTING)) == []


def test_a_child_that_cannot_start_gives_one_row_per_process() -> None:
    rows = list(Children("json", 2, wrapper=("/no/such/tool",)).run(["one", "two", "three"], SETTING))
    assert [row["ok"] for row in rows] == [False, False]
    assert "/no/such/tool" in rows[0]["error"]


def test_run_here_ends_after_a_broken_context() -> None:
    rows = list(run_here(breaking_checks.__name__, ["raises", "breaks the context", "last"], SETTING))
    assert [row["name"] for row in rows if row["ok"]] == ["raises", "breaks the context"]
