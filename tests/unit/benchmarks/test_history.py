"""The history of benchmarks: what a line holds, which earlier run a report is compared with, and what is worse."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from baton.core.errors import ConfigError
from benchmarks.history import (
    HISTORY,
    Change,
    Entry,
    Machine,
    add_entry,
    changes,
    cpu_features,
    last_of,
    read_history,
    read_reports,
    this_machine,
)
from benchmarks.history_figures import figures_of, is_better_lower

SMALL = Machine("x86_64", 2, ("avx2", "avx512f"))
LARGE = replace(SMALL, cores=64)


def entry(commit: str, machine: Machine = SMALL, **figures: float) -> Entry:
    return Entry("2026-01-01T00:00:00+00:00", commit, machine, figures)


def test_what_is_added_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "history.jsonl"
    assert read_history(file) == []
    entries = [entry("a", ms=1.5), entry("b", replace(LARGE, accelerator="H200"), ms=0.25, of_limit=0.9)]
    for one in entries:
        add_entry(file, one)
    assert read_history(file) == entries
    assert len(file.read_text().splitlines()) == 2


@pytest.mark.parametrize("line", ["{", "[]", "{}", '{"date": "", "commit": "", "machine": {}, "figures": {"a": 1}}'])
def test_a_line_that_is_no_entry_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "history.jsonl"
    add_entry(file, entry("a", ms=1.0))
    file.write_text(file.read_text() + line + "\n")
    with pytest.raises(ConfigError, match=r"Line 2 of history\.jsonl"):
        read_history(file)


def test_a_run_is_compared_with_the_last_one_of_its_kind_of_machine() -> None:
    entries = [entry("a", x=1.0, y=7.0), entry("b", x=2.0), entry("c", LARGE, x=9.0)]
    newest = last_of(entries, SMALL)
    assert {name: (found.commit, value) for name, (found, value) in newest.items()} == {
        "x": ("b", 2.0),
        "y": ("a", 7.0),
    }
    assert last_of(entries, replace(SMALL, cpu_features=("avx2",))) == {}


def test_every_figure_of_the_report_is_shown_and_no_other() -> None:
    assert changes({"x": 2.0, "gone": 1.0}, {"x": 1.0, "new": 5.0}) == [Change("x", 2.0, 1.0), Change("new", None, 5.0)]


@pytest.mark.parametrize(
    ("name", "before", "now", "ratio", "verdict"),
    [
        ("step:ms", 10.0, 20.0, 2.0, "worse"),
        ("step:ms", 10.0, 5.0, 0.5, "better"),
        ("step:of_limit", 0.4, 0.8, 2.0, "better"),
        ("step:of_limit", 0.8, 0.4, 0.5, "worse"),
        ("CPU:s_per_gb", 1.0, 1.3, 1.3, "worse"),
        ("tcp:gb_per_s", 1.0, 1.3, 1.3, "better"),
        ("step:ms", 10.0, 10.5, 1.05, ""),
        ("step:ms", None, 10.0, None, ""),
        ("step:ms", 0.0, 10.0, None, ""),
    ],
)
def test_more_is_better_but_of_times(
    name: str, before: float | None, now: float, ratio: float | None, verdict: str
) -> None:
    change = Change(name, before, now)
    assert change.ratio == (None if ratio is None else pytest.approx(ratio))
    assert change.verdict == verdict


ENGINE = {
    "ceilings": {"bytes_per_second": 2e10, "flops_per_second": 3e11},
    "dtype": "bfloat16",
    "steps": [
        {
            "case": {"batch": 8, "tokens": 1, "context": 128, "tree": False},
            "least_ms": 5.0,
            "times_ms": {"fused": [9.0, 10.0, 11.0], "transformers": [30.0, 30.0, 30.0]},
        }
    ],
}
KV_PATH = {
    "format": "baton-kv-path",
    "figures": {
        "grpc_of_tcp": 0.5,
        "grpc_gb_per_s": 2.0,
        "connected_of_tcp": 0.6,
        "connected_gb_per_s": 2.4,
        "connected_sender_cpu_s_per_gb": 0.3,
        "connected_receiver_cpu_s_per_gb": 0.2,
        "striped_of_tcp": 0.55,
        "striped_gb_per_s": 2.2,
        "shared_of_tcp": 0.75,
        "shared_gb_per_s": 3.0,
        "tcp_gb_per_s": 4.0,
        "grpc_sender_cpu_s_per_gb": 0.4,
        "grpc_receiver_cpu_s_per_gb": 0.3,
        "shared_sender_cpu_s_per_gb": 0.2,
        "shared_receiver_cpu_s_per_gb": 0.1,
    },
}
ROUTER = {
    "format": "baton-router-load",
    "latency": [{"workers": "1+1", "added_ms": {"p50": 1.5, "p99": 7.0}, "router_cpu_ms_per_request": 3.0}],
    "relay": [{"tokens_per_message": 1, "tokens_per_s": 10_000.0}],
}
STARTUP = {"format": "baton-startup", "figures": {"total": 9.0, "Ray": 2.0}}


def test_the_figures_of_every_benchmark() -> None:
    engine = figures_of(ENGINE)
    assert engine["engine/1 x 8 behind 128:ms"] == 10.0
    assert engine["engine/1 x 8 behind 128:of_limit"] == 0.5
    assert engine["machine/reads:gb_per_s"] == 20.0
    assert figures_of(KV_PATH)["kv_path/grpc:of_tcp"] == 0.5
    assert figures_of(ROUTER) == {
        "router/1+1 added p50:ms": 1.5,
        "router/1+1 added p99:ms": 7.0,
        "router/1+1 CPU per request:ms": 3.0,
        "router/relay, 1 per message:tokens_per_s": 10_000.0,
    }
    assert figures_of(STARTUP) == {"startup/total:s": 9.0, "startup/Ray:s": 2.0}


def test_times_are_known_by_their_units() -> None:
    names = [name for report in (ENGINE, KV_PATH, ROUTER, STARTUP) for name in figures_of(report)]
    assert [name for name in names if is_better_lower(name)] == [
        name for name in names if name.endswith((":ms", ":s", ":s_per_gb"))
    ]


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ({"format": "guess"}, "'guess' has no place"),
        ({}, "None has no place"),
        ({"format": "baton-kv-path"}, "not whole"),
    ],
)
def test_a_report_of_something_else_is_refused(document: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        figures_of(document)


def test_reports_are_files_and_folders_of_them(tmp_path: Path) -> None:
    (tmp_path / "kv.json").write_text(json.dumps(KV_PATH))
    (tmp_path / "note.txt").write_text("no report")
    alone = tmp_path.parent / "startup.json"
    alone.write_text(json.dumps(STARTUP))
    figures = read_reports([tmp_path, alone])
    assert "kv_path/grpc:of_tcp" in figures
    assert "startup/total:s" in figures


def test_without_reports_there_is_nothing_to_compare(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="make bench"):
        read_reports([tmp_path])
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_reports([tmp_path])
    (tmp_path / "broken.json").write_text("[]")
    with pytest.raises(ConfigError, match="holds a list"):
        read_reports([tmp_path])


def test_a_machine_is_told_by_what_matters_to_kernels_alone() -> None:
    info = "processor\t: 0\nmodel name\t: Some avx512_bf16 CPU\nflags\t\t: fpu avx2 sse avx512f\n"
    assert cpu_features(info) == ("avx2", "avx512f")
    assert cpu_features("Features\t: fp asimd bf16") == ("asimd", "bf16")
    assert cpu_features("") == ()


def test_this_machine_is_the_same_every_time_and_survives_the_file(tmp_path: Path) -> None:
    machine = this_machine()
    add_entry(tmp_path / "h.jsonl", entry("a", machine, x=1.0))
    assert last_of(read_history(tmp_path / "h.jsonl"), this_machine())["x"][1] == 1.0


def test_the_committed_history_can_be_read() -> None:
    entries = read_history(HISTORY)
    assert entries
    assert all(found.figures and found.commit for found in entries)
