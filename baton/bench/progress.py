"""What a run is doing, while it does it: a changing line on a terminal, a line for each stage elsewhere."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
from rich.console import Console
from rich.text import Text

from baton.bench.runner import StageRun
from baton.bench.sample import UNFINISHED, UNSENT

_INTERVAL_S = 0.5
_RECENT = 50


@asynccontextmanager
async def show_progress(run: StageRun, console: Console) -> AsyncIterator[None]:
    """Watches ``run`` until the block ends."""
    if not console.is_terminal:
        console.print(Text(f"{run.stage.label} ..."), soft_wrap=True)
        yield
        return
    with console.status("") as status:

        async def update() -> None:
            start_s = time.perf_counter()
            while True:
                status.update(Text(progress_line(run, time.perf_counter() - start_s)))
                await asyncio.sleep(_INTERVAL_S)

        watcher = asyncio.create_task(update())
        try:
            yield
        finally:
            watcher.cancel()


def progress_line(run: StageRun, elapsed_s: float) -> str:
    """The state of a run in one line."""
    answered = failed = in_flight = waiting = 0
    for sample in run.samples:
        answered += sample.error is None
        in_flight += sample.error == UNFINISHED
        waiting += sample.error == UNSENT
        failed += sample.error not in (None, UNFINISHED, UNSENT)
    recent = [value for s in run.samples[-_RECENT:] if (value := s.ttft_s(from_send=False)) is not None]
    parts = [
        run.stage.label,
        f"{elapsed_s:.0f} s",
        f"{answered} answered",
        f"{in_flight} in flight",
        f"{waiting} waiting" if waiting else "",
        f"{failed} failed" if failed else "",
        f"TTFT {1000 * float(np.median(recent)):.0f} ms lately" if recent else "",
    ]
    return ", ".join(filter(None, parts))
