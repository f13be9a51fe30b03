"""A few requests through the real processes: gateway and router in one, simulated workers in another."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from baton.core.errors import InternalError
from benchmarks import connection_burst
from benchmarks.router_load import measure, processes
from benchmarks.router_load.command import RouterLoadSettings, run
from benchmarks.router_load.measure import LatencySettings
from benchmarks.router_load.processes import RouterUnderTest, router_under_test
from benchmarks.router_load.setup import Workers
from tests.tiny_tokenizers import write_model_folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model folder without weights, since nothing loads them."""
    return write_model_folder(tmp_path / "tiny")


def test_every_measurement_has_its_figures_and_ends_its_processes(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pids: list[int] = []

    @asynccontextmanager
    async def watched(*arguments: Any) -> AsyncGenerator[RouterUnderTest]:
        async with router_under_test(*arguments) as target:
            pids.extend(child.pid for child in (target.router, target.workers))
            yield target

    monkeypatch.setattr(measure, "router_under_test", watched)
    settings = RouterLoadSettings(
        latency=LatencySettings(rate=50.0, count=20, sizes=((1, 1),)),
        relay_streams=2,
        relay_tokens=10,
        relay_batches=(8,),
        open_streams=3,
        open_tokens=2,
        overrides={"model": str(model)},
    )
    lines: list[str] = []
    shown = run(settings, lines.append, tmp_path / "out.json")
    document = json.loads((tmp_path / "out.json").read_text())
    assert [run["workers"] for run in document["latency"]] == ["1+1"]
    assert document["latency"][0]["through_router_ms"]["count"] == 20
    assert document["latency"][0]["stages_ms"]["admission and routing"]["count"] >= 20
    assert all(mib > 0 for mib in document["latency"][0]["rss_mib"])
    [relay] = document["relay"]
    assert relay["tokens_per_message"] == 8
    assert relay["tokens_per_s"] > 0
    assert 2 <= relay["events_per_stream"] <= relay["tokens"] + 1  # one for each message, and the end mark
    assert document["open_streams"]["finished"] == 3
    assert len(pids) == 6
    assert not any(psutil.pid_exists(pid) for pid in pids)
    console = Console(width=160)
    with console.capture() as capture:
        console.print(shown)
    assert "added p50" in capture.get()
    assert lines


async def test_a_router_that_cannot_start_is_an_error_and_leaves_no_process(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "no_workers.py").write_text("import sys\nprint([], flush=True)\nsys.stdin.read()\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(processes, "_WORKERS_MODULE", "no_workers")
    monkeypatch.setattr(processes, "_ROUTER_MODULE", "benchmarks.router_load.no_such_module")
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with pytest.raises(InternalError, match="no_such_module ended"):
        async with router_under_test(Workers(), {"model": str(model)}):
            pass
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


async def test_every_stream_of_a_burst_ends_with_its_tokens_or_with_a_type(model: Path) -> None:
    overrides = {"model": str(model), "router": {"max_connections": 20, "max_inflight": 10}}
    burst = await connection_burst.measure(60, 3, 1024, overrides)
    assert set(burst.outcomes) <= {"complete", "429 overloaded", "503 endpoint_full"}
    assert sum(burst.outcomes.values()) == 60
    assert burst.outcomes["complete"] >= 10
    assert burst.num_untyped == burst.failed_probes == 0
    assert burst.health.count > 0
