"""Fixtures for tests that need a CUDA device and are skipped without one.

The tests are the checks of ``benchmarks.device_run``, one test for each. Checks that may break a CUDA context run in
child processes, which all selected checks share, so that kernels are compiled in parallel.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import pytest
import torch

from benchmarks.device_run.children import Children, processes_per_gpu
from benchmarks.device_run.part import Row, Setting, device_named

SETTING = Setting(device_named("cuda"), "llama-3.1-8b")


@pytest.fixture(scope="session", autouse=True)
def cuda() -> torch.device:
    """The device, which is looked up only when the first test runs, because that takes a while."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return SETTING.device


@pytest.fixture(scope="module")
def rows_of(request: pytest.FixtureRequest, cuda: torch.device) -> dict[str, list[Row]]:
    """The rows of the selected checks of the test module's ``CHECKS``, by check."""
    selected: Sequence[str] = [
        item.callspec.params["name"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.module is request.module
    ]
    rows: dict[str, list[Row]] = defaultdict(list)
    children = Children(request.module.CHECKS, processes_per_gpu())
    for name, row in children.run_named(selected, SETTING):
        rows[name].append(row)
    return rows
