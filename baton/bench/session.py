"""A target that is ready to be measured: who answers, what it is sent, and how the counts were made."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from baton.bench.assembly import AssembledWorkload, WorkloadPlan, assemble_workload
from baton.bench.client import LoadClient
from baton.bench.discovery import describe_endpoint, find_model, settle
from baton.bench.endpoint import Endpoint
from baton.bench.runner import StageRun, run_stage
from baton.bench.settings import TargetSettings, WorkloadSettings
from baton.bench.workload import Workload

Report = Callable[[str], None]
_Prepared = tuple[Endpoint, list[str], AssembledWorkload]


class InterruptedBeforeLoadError(Exception):
    """A signal came while the target was asked what has to be known: there is nothing to report."""


@dataclass(frozen=True, slots=True)
class Session:
    """
    Attributes:
        seed: of arrival times.
        target: what is measured, and what it is sent; JSON-ready.
        notes: what holds for all figures.
    """

    client: LoadClient
    workload: Workload
    seed: int
    target: dict[str, Any]
    notes: list[str]

    async def run(self, run: StageRun, stop: asyncio.Event) -> None:
        """Fills ``run``, see :func:`baton.bench.runner.run_stage`."""
        await run_stage(run, self.workload.requests(run.stage.index), self.client, stop, self.seed)


@asynccontextmanager
async def open_session(
    target: TargetSettings,
    settings: WorkloadSettings,
    plan: WorkloadPlan,
    report: Report,
    stop: asyncio.Event,
) -> AsyncIterator[Session]:
    """Asks the target what has to be known, and closes the connections afterwards.

    Raises:
        BatonError: nobody answers, or an option cannot be used with this target.
        InterruptedBeforeLoadError: ``stop`` was set meanwhile.
    """
    endpoint, notes, assembled = await _unless_stopped(_prepare(target, settings, plan, report), stop)
    description = {
        "url": endpoint.base_url,
        "model": endpoint.model,
        "endpoint": endpoint.kind,
        "workload": assembled.workload.describe(),
        "counting": assembled.counting,
    }
    async with LoadClient(endpoint, target.timeout_s) as client:
        yield Session(client, assembled.workload, settings.seed, description, notes + assembled.notes)


async def _prepare(target: TargetSettings, settings: WorkloadSettings, plan: WorkloadPlan, report: Report) -> _Prepared:
    endpoint, notes = await settle(await find_model(describe_endpoint(target)))
    report(f"{endpoint.generate_url}, model {endpoint.model}")
    return endpoint, notes, await assemble_workload(target, settings, plan, endpoint, report)


async def _unless_stopped(preparation: Coroutine[Any, Any, _Prepared], stop: asyncio.Event) -> _Prepared:
    preparing, stopping = asyncio.create_task(preparation), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((preparing, stopping), return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            raise InterruptedBeforeLoadError
        return preparing.result()
    finally:
        preparing.cancel()
        stopping.cancel()
        await asyncio.gather(preparing, stopping, return_exceptions=True)


@contextmanager
def stop_on_signals() -> Iterator[asyncio.Event]:
    """An event that the first SIGINT or SIGTERM sets. The next one does what it always does."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM)

    def handle() -> None:
        stop.set()
        for number in signals:
            loop.remove_signal_handler(number)

    # Only the main thread may handle signals; elsewhere nobody presses Ctrl-C.
    with suppress(RuntimeError, ValueError):
        for number in signals:
            loop.add_signal_handler(number, handle)
    try:
        yield stop
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


@contextmanager
def without_interruption() -> Iterator[None]:
    """SIGINT does nothing meanwhile: reports take a second or two to write, and half of them are worth nothing."""
    if threading.current_thread() is not threading.main_thread():  # which alone may handle signals
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before or signal.default_int_handler)
