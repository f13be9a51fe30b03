"""Other kinds of CPU, as far as this one can stand in for them; ``make test-cpu-kinds`` runs more tests on each."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cpu_kinds.__main__ import PIECES, PROGRAMS
from tests.cpu_kinds.compile_only import INSTRUCTIONS
from tests.cpu_kinds.kinds import KINDS, environment_of, host_features, how_to_run
from tests.cpu_kinds.process import VARIABLE
from tests.cpu_kinds.run import KindRun, run_as

FUSED = "tests/unit/baton/engine/cpu"
QUICK = [f"{FUSED}/test_cpu_kind_in_force.py", f"{FUSED}/test_smallest_products.py", "-k", "not float32"]
ZEN3 = KINDS["avx2"].needs | {"sse2"}
SAPPHIRE_RAPIDS = KINDS["amx"].needs | ZEN3 | {"avx512fp16", "amx-int8", "vaes"}


@pytest.mark.skipif(VARIABLE in os.environ, reason="this process is one of those that are started here")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.thorough(covered_by="[amx]")) if name == "amx-fast-pairs" else name
        for name in KINDS
    ],
)
def test_each_kind_of_cpu_computes_correctly(name: str, record_property: pytest.RecordProperty) -> None:
    if how_to_run(KINDS[name], host_features()) == "as it is":
        record_property("cpu kind", f"{name:<15} as it is  by this run")
        return
    run = run_as(name, QUICK)
    record_property("cpu kind", run.line)
    if run.how is None:
        pytest.skip(f"this CPU cannot stand in for {name}")
    assert run.is_good, run.output


@pytest.mark.skipif(platform.machine() != "x86_64", reason="instructions are those of x86")
@pytest.mark.thorough(covered_by="test_each_kind_of_cpu_computes_correctly")
@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_the_compiler_accepts_instructions_of_other_cpu_kinds(name: str) -> None:
    command = [sys.executable, "-m", "tests.cpu_kinds.compile_only", name]
    ended = subprocess.run(command, cwd=Path(__file__).parents[5], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    assert set(ended.stdout.split()) >= INSTRUCTIONS[name]


def test_every_listed_test_file_exists() -> None:
    root = Path(__file__).parents[5]
    assert [name for name in (*PIECES, *PROGRAMS) if not (root / name).exists()] == []


def test_a_cpu_represents_smaller_kinds_and_emulates_larger_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")

    def how(features: frozenset[str]) -> list[str | None]:
        return [how_to_run(kind, features) for kind in KINDS.values()]

    assert how(SAPPHIRE_RAPIDS) == ["as it is", "as it is", "masked", "masked", "masked", "masked"]
    assert how(ZEN3) == ["emulated", "emulated", "emulated", "emulated", "as it is", "masked"]
    assert how(frozenset({"sse2"})) == [None, None, None, None, None, "as it is"]
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert how(SAPPHIRE_RAPIDS) == [None] * len(KINDS)


def test_a_masked_kind_loses_only_the_masked_features(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    known = {name: name in SAPPHIRE_RAPIDS for name in (*SAPPHIRE_RAPIDS, "xop")}
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_features", lambda: known)
    for kind in list(KINDS.values())[2:]:
        variables = environment_of(kind, SAPPHIRE_RAPIDS)
        named = set(variables["NUMBA_CPU_FEATURES"].split(","))
        assert {name[1:] for name in named} == set(known)
        assert {f"+{name}" for name in kind.needs} <= named
        assert not [name for name in named if name.startswith("+") and name[1:].startswith(kind.lacks)]
        assert variables["ONEDNN_MAX_CPU_ISA"] == kind.onednn_limit


def test_a_run_succeeds_if_some_tests_pass_and_none_fail() -> None:
    assert KindRun("sse", "masked", num_passed=3).is_good
    assert not KindRun("sse", "masked", num_skipped=3).is_good
    assert not KindRun("sse", "masked", num_passed=3, num_failed=1, status=1).is_good
    assert not KindRun("sse", "masked", status=-11).is_good
    assert KindRun("sse", None).is_good
    assert KindRun("sse", None).line.endswith("not on this CPU")
