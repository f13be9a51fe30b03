"""A run against a target: preparation, stages with progress, and handling of signals."""

from __future__ import annotations

import asyncio
import resource
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from baton.bench.assembly import AssembledWorkload, WorkloadPlan, assemble_workload
from baton.bench.client import LoadClient
from baton.bench.discovery import describe_endpoint, find_model, settle
from baton.bench.endpoint import Endpoint
from baton.bench.runner import StageRun, run_stage
from baton.bench.sample import UNFINISHED, UNSENT
from baton.bench.settings import TargetSettings, WorkloadSettings
from baton.bench.workload import Workload

_PROGRESS_INTERVAL_S = 0.5


class InterruptedBeforeLoadError(Exception):
    """A signal came before the first stage, so there is nothing to report."""


@dataclass(frozen=True, slots=True)
class Session:
    """A prepared run.

    Attributes:
        seed: seed of arrival times.
        target: description of target and workload; JSON-ready.
        notes: notes on all figures.
    """

    client: LoadClient
    workload: Workload
    seed: int
    target: dict[str, Any]
    notes: list[str]
    console: Console

    async def run(self, run: StageRun, stop: asyncio.Event) -> None:
        """Runs a stage with :func:`baton.bench.runner.run_stage` and shows its progress."""
        async with _progress(run, self.console):
            await run_stage(run, self.workload.requests(run.stage.index), self.client, stop, self.seed)


@asynccontextmanager
async def open_session(
    target: TargetSettings, settings: WorkloadSettings, plan: WorkloadPlan, console: Console, stop: asyncio.Event
) -> AsyncIterator[Session]:
    """Discovers the target's model and parameters, and closes the connections at the end.

    Raises:
        BatonError: the target does not answer, or an option cannot be used with it.
        InterruptedBeforeLoadError: ``stop`` was set before the load began.
    """
    _allow_connections()
    preparing, stopping = (
        asyncio.create_task(_prepare(target, settings, plan, console)),
        asyncio.create_task(stop.wait()),
    )
    try:
        await asyncio.wait((preparing, stopping), return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            raise InterruptedBeforeLoadError
        endpoint, notes, assembled = preparing.result()
    finally:
        preparing.cancel()
        stopping.cancel()
        await asyncio.gather(preparing, stopping, return_exceptions=True)
    description = {
        "url": endpoint.base_url,
        "model": endpoint.model,
        "endpoint": endpoint.kind,
        "workload": assembled.workload.describe(),
        "counting": assembled.counting,
    }
    async with LoadClient(endpoint, target.timeout_s) as client:
        yield Session(client, assembled.workload, settings.seed, description, notes + assembled.notes, console)


async def _prepare(
    target: TargetSettings, settings: WorkloadSettings, plan: WorkloadPlan, console: Console
) -> tuple[Endpoint, list[str], AssembledWorkload]:
    say: Callable[[str], None] = lambda line: console.print(Text(line), soft_wrap=True)  # noqa: E731
    endpoint, notes = await settle(await find_model(describe_endpoint(target)))
    say(f"{endpoint.generate_url}, model {endpoint.model}")
    return endpoint, notes, await assemble_workload(target, settings, plan, endpoint, say)


def _allow_connections() -> None:
    """Raises the soft limit of open files to the hard one, since each request in flight has its own connection."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@asynccontextmanager
async def _progress(run: StageRun, console: Console) -> AsyncIterator[None]:
    """Shows a live progress line on a terminal, or one static line elsewhere."""
    if not console.is_terminal:
        console.print(Text(f"{run.stage.label} ..."), soft_wrap=True)
        yield
        return
    with console.status("") as status:

        async def update() -> None:
            start_s = time.perf_counter()
            while True:
                status.update(Text(progress_line(run, time.perf_counter() - start_s)))
                await asyncio.sleep(_PROGRESS_INTERVAL_S)

        watcher = asyncio.create_task(update())
        try:
            yield
        finally:
            watcher.cancel()


def progress_line(run: StageRun, elapsed_s: float) -> str:
    errors = [sample.error for sample in run.samples]
    counts = {
        "answered": errors.count(None),
        "in flight": errors.count(UNFINISHED),
        "waiting": errors.count(UNSENT),
        "failed": sum(error not in (None, UNFINISHED, UNSENT) for error in errors),
    }
    return ", ".join([run.stage.label, f"{elapsed_s:.0f} s", *(f"{n} {name}" for name, n in counts.items() if n)])


@contextmanager
def stop_on_signals() -> Iterator[asyncio.Event]:
    """An event that the first SIGINT or SIGTERM sets. The second one has its usual effect."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM)

    def handle() -> None:
        stop.set()
        for number in signals:
            loop.remove_signal_handler(number)

    with suppress(RuntimeError, ValueError):  # only the main thread may handle signals
        for number in signals:
            loop.add_signal_handler(number, handle)
    try:
        yield stop
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


@contextmanager
def without_interruption() -> Iterator[None]:
    """Ignores SIGINT while a report is written."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before or signal.default_int_handler)
