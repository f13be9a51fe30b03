"""A cluster that stops while it serves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from cluster.config.config import BatonConfig
from cluster.controller.launch import Cluster
from tests.e2e.conftest import start
from tests.jobs_under_kills import kill_one
from tests.running_cluster import MODEL
from tests.user_machine import user_environment

SETTINGS = {"simulation": {"profile": "h100-8b", "workers_per_process": 2}, "router": {"port": 0}}
BODY = {"model": MODEL, "prompt": "On and on", "max_tokens": 2000, "ignore_eos": True}


async def stream(http: httpx.AsyncClient, has_begun: asyncio.Event, **parameters: int) -> list[str]:
    lines = []
    async with http.stream("POST", "/v1/completions", json={**BODY, "stream": True, **parameters}) as answer:
        async for line in answer.aiter_lines():
            has_begun.set()
            lines += [line] if line else []
    return lines


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    """In the module's scope, since Ray changes the environment when it starts."""
    return start(BatonConfig.from_dict(SETTINGS))


def test_stopping_the_cluster_ends_running_requests_with_an_error(cluster: Cluster) -> None:
    """Neither a stream nor a whole answer is cut off without an error."""

    async def ask_and_stop() -> tuple[list[str], httpx.Response]:
        async with httpx.AsyncClient(base_url=cluster.endpoint, timeout=60) as http:
            has_begun = asyncio.Event()
            streamed = asyncio.create_task(stream(http, has_begun))
            whole = asyncio.create_task(http.post("/v1/completions", json=BODY))
            await has_begun.wait()
            await asyncio.to_thread(cluster.stop)
            return await streamed, await whole

    try:
        lines, answer = asyncio.run(ask_and_stop())
    finally:
        cluster.stop()
    assert len(lines) > 2
    assert json.loads(lines[-1].removeprefix("data: "))["error"]["reason"] == "stopping"
    assert answer.status_code == 429
    assert answer.json()["error"]["reason"] == "stopping"


@contextlib.contextmanager
def baton_up(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Runs `baton up` with a Ray of its own; yields its process and the endpoint."""
    (folder / "config.yaml").write_text(yaml.safe_dump(SETTINGS))
    command = [sys.executable, "-m", "cluster.cli.cli", "up", "-c", "config.yaml"]
    with (folder / "log").open("wb") as log:
        environment = user_environment(folder)
        up = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=log)
    assert up.stdout is not None
    endpoint = up.stdout.readline().decode().strip()
    assert endpoint, (folder / "log").read_text()
    processes = psutil.Process(up.pid).children(recursive=True)
    try:
        yield up, endpoint
    finally:
        up.kill()
        up.wait()
        for process in psutil.wait_procs(processes, timeout=10)[1]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


async def stream_and(endpoint: str, disturb: Callable[[], None], **parameters: int) -> list[str]:
    """The lines of a stream during which ``disturb`` was called."""
    async with httpx.AsyncClient(base_url=endpoint, timeout=60) as http:
        has_begun = asyncio.Event()
        streamed = asyncio.create_task(stream(http, has_begun, **parameters))
        await has_begun.wait()
        disturb()
        return await streamed


def test_streams_end_with_an_error_when_baton_up_is_killed(tmp_path: Path) -> None:
    """Its Ray ends with it, and takes the router along; the router is faster."""
    with baton_up(tmp_path) as (up, endpoint):
        lines = asyncio.run(stream_and(endpoint, up.kill))
    assert json.loads(lines[-1].removeprefix("data: "))["error"]["reason"] == "stopping"


def test_a_local_cluster_outlives_its_controller(tmp_path: Path) -> None:
    """Simulated workers share processes of the controller, so the stream also waits for others."""

    def kill_controller() -> None:
        assert kill_one(lambda: psutil.Process(up.pid).children(recursive=True), "ray::Controller", random.Random(1))

    with baton_up(tmp_path) as (up, endpoint):
        lines = asyncio.run(stream_and(endpoint, kill_controller, max_tokens=600))
        pools = httpx.get(f"{endpoint}/admin/status", timeout=30).json()["pools"]
    assert lines[-1] == "data: [DONE]"
    assert [pool["target"] for pool in pools.values()] == [1, 1]
    assert "the cluster has a controller again, after" in (tmp_path / "log").read_text()
