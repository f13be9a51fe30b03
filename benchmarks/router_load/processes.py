"""Starts workers and router as processes, queries the router's figures, and ends both by their pids."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
import tempfile
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from baton.core.errors import InternalError
from baton.engine.models.model_cache import CACHE_VARIABLE
from benchmarks.router_load.setup import Workers, write_setup
from cluster.registry.workers import WorkerInfo

_WORKERS_MODULE = "cluster.simulation.standalone"
_ROUTER_MODULE = "benchmarks.router_load.router_process"
_READY_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 10.0
_LINE_BYTES = 1 << 22


class Child:
    """A process that communicates by lines of JSON and ends when its standard input ends."""

    def __init__(self, process: asyncio.subprocess.Process, name: str) -> None:
        self._process = process
        self._name = name
        self._watched = psutil.Process(process.pid)

    @classmethod
    async def start(cls, module: str, arguments: Sequence[str], environment: Mapping[str, str]) -> Child:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            module,
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, **environment},
            limit=_LINE_BYTES,
        )
        return cls(process, module)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def cpu_s(self) -> float:
        """CPU seconds of all its threads so far."""
        times = self._watched.cpu_times()
        return float(times.user + times.system)

    @property
    def rss_bytes(self) -> int:
        return int(self._watched.memory_info().rss)

    def send(self, value: Any) -> None:
        if self._process.stdin is None:
            raise RuntimeError("the process was started without a standard input")
        self._process.stdin.write(json.dumps(value).encode() + b"\n")

    async def receive(self) -> Any:
        """The next message of the process.

        Raises:
            InternalError: the process ended, or sent nothing for too long.
        """
        if self._process.stdout is None:
            raise RuntimeError("the process was started without a standard output")
        try:
            async with asyncio.timeout(_READY_TIMEOUT_S):
                line = await self._process.stdout.readline()
        except TimeoutError as error:
            raise InternalError(f"{self._name} sent no message within {_READY_TIMEOUT_S:g} s.") from error
        if not line:
            raise InternalError(f"{self._name} ended before it was ready; see its output above.")
        return json.loads(line)

    async def stop(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


@dataclass(frozen=True, slots=True)
class RouterUnderTest:
    """A serving router and its workers.

    Attributes:
        endpoint: ``http://host:port``.
        model: the served model's name.
    """

    endpoint: str
    model: str
    infos: tuple[WorkerInfo, ...]
    router: Child
    workers: Child

    async def figures(self) -> dict[str, Any]:
        """The router's figures; see :mod:`benchmarks.router_load.router_process`."""
        self.router.send({})
        figures: dict[str, Any] = await self.router.receive()
        return figures


@asynccontextmanager
async def router_under_test(
    workers: Workers,
    overrides: Mapping[str, Any] | None = None,
    profile: Path | None = None,
    max_files: int | None = None,
) -> AsyncGenerator[RouterUnderTest]:
    """Runs both processes within the context. They leave no files behind.

    Args:
        overrides: sections of the configuration.
        profile: file for cProfile's output of the router.
        max_files: soft and hard limit of the router's open files; ``None`` leaves them as they are.

    Raises:
        InternalError: a process did not start.
    """
    with tempfile.TemporaryDirectory(prefix="baton-router-load-") as name:
        folder = Path(name)
        config = write_setup(folder, workers, dict(overrides or {}))
        arguments = ["-c", str(config)]
        fleet = await Child.start(_WORKERS_MODULE, arguments, {})
        try:
            if profile is not None:
                arguments = [*arguments, "--profile", str(profile)]
            # A separate cache, because what the router learns from these workers does not apply to real ones.
            router = await Child.start(_ROUTER_MODULE, arguments, _own_cache(folder))
            if max_files is not None:
                resource.prlimit(router.pid, resource.RLIMIT_NOFILE, (max_files, max_files))
            try:
                infos = await fleet.receive()
                router.send(infos)
                ready = await router.receive()
                model = infos[0]["model_name"]
                known = tuple(WorkerInfo.from_dict(info) for info in infos)
                yield RouterUnderTest(ready["endpoint"], model, known, router, fleet)
            finally:
                await router.stop()
        finally:
            await fleet.stop()


def _own_cache(folder: Path) -> dict[str, str]:
    return {CACHE_VARIABLE: str(folder / "cache")}
