"""The facts that a role reads from its worker."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from baton.engine.runner.model_runner import ModelRunner
from cluster.config.config import BatonConfig
from cluster.worker.role import WorkerContext
from tests.credentials import CREDENTIALS


@pytest.mark.parametrize(
    ("setting", "device", "waits", "expected"),
    [
        ("auto", "cpu", False, False),
        ("auto", "cuda", False, True),
        ("auto", "cuda", True, False),
        ("on", "cuda", True, True),
        ("on", "cpu", False, True),
        ("off", "cuda", False, False),
    ],
)
def test_auto_overlaps_steps_if_the_forward_leaves_the_host_idle(
    setting: str, device: str, waits: bool, expected: bool
) -> None:
    config = BatonConfig.model_validate({"engine": {"overlap_scheduling": setting}})
    runner = SimpleNamespace(device=SimpleNamespace(type=device), forward_waits=False)
    context = WorkerContext("decode-0", config, config.decode, cast("ModelRunner", runner), 64, 1, CREDENTIALS)
    runner.forward_waits = waits  # known only when graphs were to be captured
    assert context.overlaps_scheduling is expected
