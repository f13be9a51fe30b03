"""Whether the client itself was the bottleneck: its CPU time, and how late its event loop ran."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np

_TICK_S = 0.05


@dataclass(frozen=True, slots=True)
class ClientLoad:
    """
    Attributes:
        cpu_share: CPU seconds of this process per second; 1 is one core.
        loop_lag_p99_ms: by which timers of the event loop were late; latencies may be over by as much.
    """

    cpu_share: float = 0.0
    loop_lag_p99_ms: float = 0.0


class ClientLoadMeter:
    """As a context inside a running event loop; ``load`` is there afterwards."""

    def __init__(self) -> None:
        self.load = ClientLoad()
        self._lags_s: list[float] = []
        self._task: asyncio.Task[None] | None = None
        self._start_s = 0.0
        self._start_cpu_s = 0.0

    def __enter__(self) -> Self:
        self._start_s, self._start_cpu_s = time.perf_counter(), time.process_time()
        self._task = asyncio.create_task(self._tick())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
        elapsed_s = max(time.perf_counter() - self._start_s, 1e-9)
        lag_s = float(np.percentile(self._lags_s, 99)) if self._lags_s else 0.0
        self.load = ClientLoad((time.process_time() - self._start_cpu_s) / elapsed_s, 1000.0 * lag_s)

    async def _tick(self) -> None:
        while True:
            due_s = time.perf_counter() + _TICK_S
            await asyncio.sleep(_TICK_S)
            self._lags_s.append(time.perf_counter() - due_s)
