"""The reference server of the benchmarks in a test's own event loop, and a helper for its typical use."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from baton.bench.client import LoadClient
from baton.bench.endpoint import COMPLETIONS, Endpoint, RequestSpec
from baton.bench.runner import StageRun, run_stage
from baton.bench.stages import Stage
from tests.reference_server import MODEL, ReferenceServer, Schedule


@asynccontextmanager
async def serving(application: web.Application) -> AsyncIterator[str]:
    """Serves ``application`` on a free port of the loopback interface, and yields its base URL."""
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        host, port = runner.addresses[0]
        yield f"http://{host}:{port}/v1"
    finally:
        await runner.cleanup()


async def run_against(
    schedule: Schedule, stage: Stage, spec: RequestSpec, *, kind: str = COMPLETIONS, timeout_s: float = 30.0
) -> tuple[StageRun, ReferenceServer]:
    """Runs a stage of equal requests against a reference server."""
    server = ReferenceServer(schedule)
    run = StageRun(stage)
    async with serving(server.application) as url, LoadClient(Endpoint(url, MODEL, kind), timeout_s) as client:
        await run_stage(run, iter(lambda: spec, None), client, asyncio.Event(), seed=0)
    return run, server
