"""Attention's kernels and those that quantize rows, against float64."""

from __future__ import annotations

import pytest

from benchmarks.device_run import kernel_checks
from benchmarks.device_run.part import Row
from tests.device.conftest import SETTING

CHECKS = kernel_checks.__name__


@pytest.mark.parametrize("name", kernel_checks.names(SETTING))
def test_kernels_match_float64(name: str, rows_of: dict[str, list[Row]]) -> None:
    assert rows_of[name]
    assert [row for row in rows_of[name] if not row["ok"]] == []
