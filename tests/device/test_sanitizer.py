"""The smallest cases of attention touch nothing out of bounds."""

from __future__ import annotations

import shutil

import pytest

from benchmarks.device_run.sanitizer_part import run
from tests.device.conftest import SETTING


def test_kernels_access_no_memory_out_of_bounds() -> None:
    if shutil.which("compute-sanitizer") is None:
        pytest.skip("compute-sanitizer is not on the PATH; it comes with NVIDIA's CUDA toolkit")
    rows = list(run(SETTING))
    assert [row for row in rows if not row.get("ok", True)] == []
    assert "ok" in rows[-1], rows[-1]["not_run"]
