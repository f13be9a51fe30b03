"""Every case that ``make test`` leaves out names one that finds the same faults, and that one is there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.thorough_cases import wrong_records

HERE = "tests/unit/test_x.py"
OTHER = "tests/unit/test_thorough_cases.py"


def item(name: str, covered_by: str | None = None) -> Any:
    """A collected case; ``covered_by`` makes it a thorough one."""
    marker = None if covered_by is None else pytest.mark.thorough(covered_by=covered_by).mark
    return SimpleNamespace(nodeid=f"{HERE}::{name}", get_closest_marker=lambda _: marker)


def problems(covered_by: str) -> list[str]:
    items = [item("test_a[1-tall]"), item("TestB::test_b"), item("test_a[2]", covered_by), item("test_c", "test_b")]
    return wrong_records(items, Path(__file__).parents[2])


@pytest.mark.parametrize(
    "covered_by",
    ["test_a", "test_a[1-tall]", "test_b", "[tall]", f"{HERE}::test_b", f"{OTHER}::test_an_existing_case_is_accepted"],
)
def test_an_existing_case_is_accepted(covered_by: str) -> None:
    assert problems(covered_by) == []


@pytest.mark.parametrize(
    "covered_by",
    ["", "test_c", "test_a[2]", "[2]", "[small]", "test_d", "tests/unit/none.py::test_a", f"{OTHER}::test_a"],
)
def test_a_missing_or_thorough_case_is_reported(covered_by: str) -> None:
    [problem] = problems(covered_by)
    assert problem == f"{HERE}::test_a[2]: covered_by={covered_by!r} names no test of make test"
