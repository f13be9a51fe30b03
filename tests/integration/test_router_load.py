"""A few requests through the real processes: gateway and router in one, simulated workers in another."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from benchmarks.router_load import processes
from benchmarks.router_load.client import http_load
from benchmarks.router_load.command import RouterLoadSettings, run
from benchmarks.router_load.measure import LatencySettings
from benchmarks.router_load.processes import router_under_test
from benchmarks.router_load.setup import Workers
from engine.errors import InternalError
from tests.tiny_tokenizers import write_model_folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that has no weights, since nobody loads them."""
    return write_model_folder(tmp_path / "tiny")


async def test_processes_answer_and_end_with_the_context(model: Path):
    overrides = {"model": str(model)}
    async with router_under_test(Workers(), overrides) as target, http_load(target) as load:
        pids = [child.pid for child in (target.router, target.workers)]
        assert await load.one_token(1) > 0
        outcome = await load.stream(2, 12)
        figures = await target.figures()
    assert 2 <= outcome.num_events <= 13  # one for each token that has text, and the end mark
    assert figures["rss_bytes"] > 0
    assert figures["stages"]["admission and routing"]["count"] == 2
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_every_measurement_has_its_figures(model: Path, tmp_path: Path):
    settings = RouterLoadSettings(
        latency=LatencySettings(rate=50.0, count=20, sizes=((1, 1),)),
        relay_streams=2,
        relay_tokens=10,
        open_streams=3,
        open_tokens=2,
        overrides={"model": str(model)},
    )
    lines: list[str] = []
    shown = run(settings, lines.append, tmp_path / "out.json")
    document = json.loads((tmp_path / "out.json").read_text())
    assert [run["workers"] for run in document["latency"]] == ["1+1"]
    assert document["latency"][0]["through_router_ms"]["count"] == 20
    assert [run["tokens_per_message"] for run in document["relay"]] == [1, 8]
    assert all(run["tokens_per_s"] > 0 for run in document["relay"])
    assert document["open_streams"]["finished"] == 3
    console = Console(width=160)
    with console.capture() as capture:
        console.print(shown)
    assert "added p50" in capture.get()
    assert lines


async def test_a_router_that_cannot_start_is_an_error_and_leaves_nothing_behind(
    model: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(processes, "_ROUTER_MODULE", "benchmarks.router_load.no_such_module")
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with pytest.raises(InternalError, match="no_such_module ended"):
        async with router_under_test(Workers(), {"model": str(model)}):
            pass
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before
