"""A cluster that stops while it serves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from cluster.config.config import BatonConfig
from cluster.controller.launch import Cluster
from tests.e2e.conftest import start
from tests.running_cluster import MODEL
from tests.user_machine import user_environment

SETTINGS = {"simulation": {"profile": "h100-8b", "workers_per_process": 2}, "router": {"port": 0}}
BODY = {"model": MODEL, "prompt": "On and on", "max_tokens": 4000, "ignore_eos": True}


async def stream(http: httpx.AsyncClient, has_begun: asyncio.Event) -> list[str]:
    lines = []
    async with http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as answer:
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


def test_streams_end_with_an_error_when_baton_up_is_killed(tmp_path: Path) -> None:
    """Its Ray ends with it, and takes the router along; the router is faster."""
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(SETTINGS))
    command = [sys.executable, "-m", "cluster.cli.cli", "up", "-c", "config.yaml"]
    with (tmp_path / "log").open("wb") as log:
        environment = user_environment(tmp_path)
        up = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=log)
    assert up.stdout is not None
    endpoint = up.stdout.readline().decode().strip()
    assert endpoint, (tmp_path / "log").read_text()
    processes = psutil.Process(up.pid).children(recursive=True)

    async def ask_and_kill() -> list[str]:
        async with httpx.AsyncClient(base_url=endpoint, timeout=60) as http:
            has_begun = asyncio.Event()
            streamed = asyncio.create_task(stream(http, has_begun))
            await has_begun.wait()
            up.kill()
            return await streamed

    try:
        lines = asyncio.run(ask_and_kill())
    finally:
        up.kill()
        up.wait()
        for process in psutil.wait_procs(processes, timeout=10)[1]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    assert json.loads(lines[-1].removeprefix("data: "))["error"]["reason"] == "stopping"
