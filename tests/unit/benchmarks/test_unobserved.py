"""What the start-up of a blinded process leaves out, and what it must not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import benchmarks

_FOLDER = Path(benchmarks.__file__).parent / "unobserved"
_PROGRAM = """
import baton.engine.engine, baton.core.steps
from cluster.telemetry.metrics import RouterMetrics
from baton.explain.timelines import TimelineStore
from baton.core.timeline import Event, Timeline
metrics, store, timeline = RouterMetrics(), TimelineStore(4), Timeline("r")
timeline.record(Event.RECEIVED)
metrics.observe_prompt(7)
store.add(timeline)
print(baton.engine.engine.add_share is baton.core.steps.add_share)
print(metrics.registry.get_sample_value("baton_prompt_tokens_total"), len(store), len(timeline.events))
"""


def test_nothing_is_counted_kept_or_noted() -> None:
    environment = {**os.environ, "PYTHONPATH": str(_FOLDER)}
    result = subprocess.run(
        [sys.executable, "-c", _PROGRAM], env=environment, capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == ["False", "0.0", "0", "1"]


def test_without_the_folder_everything_is(capsys: pytest.CaptureFixture[str]) -> None:
    """As in this process."""
    exec(_PROGRAM, {})
    assert capsys.readouterr().out.split() == ["True", "7.0", "1", "1"]
