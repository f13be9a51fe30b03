"""Runs one stage: sends its requests when they are due and collects their samples."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

import numpy as np

from baton.bench.endpoint import RequestSpec
from baton.bench.sample import Sample
from baton.bench.stages import TRACE, Bounds, Stage, intended_times, replayed_times

_TICK_S = 0.05


@dataclass(frozen=True, slots=True)
class ClientLoad:
    """The load of the client itself.

    Attributes:
        cpu_share: CPU seconds of this process per second; 1 is one core.
        loop_lag_p99_ms: delay of timers in the event loop, by which latencies may be too high.
    """

    cpu_share: float = 0.0
    loop_lag_p99_ms: float = 0.0


class ClientLoadMeter:
    """A context inside a running event loop that measures the client; ``load`` is set at its end."""

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


class Sender(Protocol):
    """The part of :class:`baton.bench.client.LoadClient` that a runner needs."""

    async def send(self, spec: RequestSpec, sample: Sample, epoch_s: float) -> None: ...


@dataclass(slots=True)
class StageRun:
    """A stage and its samples, including those in flight. Times are in seconds since the load began.

    Attributes:
        load_start_s: time at which the first request after the warm-up was due.
        load_end_s: end of the full load: the last request was sent (closed loop) or the last arrival was due (open
            loop).
        num_measured: number of samples without the warm-up.
        num_clipped: number of requests that a length limit cut.
        is_interrupted: True if it was stopped before its bounds.
    """

    stage: Stage
    samples: list[Sample] = field(default_factory=list)
    load_start_s: float = 0.0
    load_end_s: float = 0.0
    num_measured: int = 0
    num_clipped: int = 0
    is_interrupted: bool = False
    client: ClientLoad = field(default_factory=ClientLoad)

    def add(self, spec: RequestSpec, intended_s: float) -> Sample:
        """Adds a sample for ``spec``, which counts even if it fails."""
        bounds = self.stage.bounds
        is_warmup = len(self.samples) < bounds.warmup_requests or intended_s < bounds.warmup_s
        if not is_warmup:
            if self.num_measured == 0:
                self.load_start_s = intended_s
            self.num_measured += 1
        sample = Sample(intended_s, is_warmup, spec.input_tokens, spec.output_tokens)
        self.samples.append(sample)
        self.num_clipped += spec.is_clipped
        return sample


async def run_stage(
    run: StageRun, requests: Iterator[RequestSpec], sender: Sender, stop: asyncio.Event, seed: int
) -> None:
    """Runs the stage and fills ``run``, which may be read while the stage runs.

    Args:
        requests: source of requests, which must not end.
        stop: ends the stage at once when set. Answers in flight are given up.
        seed: seed of the arrival times.
    """
    with ClientLoadMeter() as meter:
        if run.stage.is_open:
            await _OpenLoop(run, sender, stop).run(_schedule(run.stage, requests, seed))
        else:
            await _ClosedLoop(run, requests, sender, stop).run()
    run.client = meter.load
    run.is_interrupted = stop.is_set()


class _ClosedLoop:
    """``concurrency`` clients, each of which sends its next request after the answer to the last one."""

    def __init__(self, run: StageRun, requests: Iterator[RequestSpec], sender: Sender, stop: asyncio.Event) -> None:
        self._run = run
        self._requests = requests
        self._sender = sender
        self._stop = stop

    async def run(self) -> None:
        epoch_s = time.perf_counter()
        clients = [asyncio.create_task(self._client(epoch_s)) for _ in range(self._run.stage.concurrency)]
        await _finish(clients, lambda: epoch_s + self._end_s() + self._run.stage.bounds.grace_s, self._stop)

    def _end_s(self) -> float:
        """End of the load. A warm-up that has not ended is limited to the duration of the measurement."""
        bounds = self._run.stage.bounds
        return bounds.seconds + (self._run.load_start_s if self._run.num_measured else bounds.warmup_s)

    async def _client(self, epoch_s: float) -> None:
        run, bounds = self._run, self._run.stage.bounds
        while run.num_measured < bounds.requests and not self._stop.is_set():
            if run.num_measured and time.perf_counter() - epoch_s >= self._end_s():
                break
            spec = next(self._requests)
            run.load_end_s = time.perf_counter() - epoch_s
            await self._sender.send(spec, run.add(spec, run.load_end_s), epoch_s)


class _OpenLoop:
    """Sends requests when they are due, regardless of earlier ones."""

    def __init__(self, run: StageRun, sender: Sender, stop: asyncio.Event) -> None:
        self._run = run
        self._sender = sender
        self._stop = stop
        cap = run.stage.max_inflight
        self._places = None if cap is None else asyncio.Semaphore(cap)

    async def run(self, schedule: Sequence[tuple[RequestSpec, float]]) -> None:
        epoch_s = time.perf_counter()
        sending: list[asyncio.Task[None]] = []
        for spec, intended_s in schedule:
            if self._run.num_measured == self._run.stage.bounds.requests:
                break
            if await _sleep_until(epoch_s + intended_s, self._stop):
                break
            self._run.load_end_s = intended_s
            sample = self._run.add(spec, intended_s)
            sending.append(asyncio.create_task(self._send(spec, sample, epoch_s)))
        deadline_s = time.perf_counter() + self._run.stage.bounds.grace_s
        await _finish(sending, lambda: deadline_s, self._stop)

    async def _send(self, spec: RequestSpec, sample: Sample, epoch_s: float) -> None:
        if self._places is None:
            await self._sender.send(spec, sample, epoch_s)
            return
        async with self._places:
            await self._sender.send(spec, sample, epoch_s)


def _schedule(stage: Stage, requests: Iterator[RequestSpec], seed: int) -> list[tuple[RequestSpec, float]]:
    """The requests of an open loop with their due times, all prepared before the first one is sent."""
    bounds = stage.bounds
    count = bounds.warmup_requests + bounds.requests
    if stage.arrival == TRACE:
        specs = [next(requests) for _ in range(count)]
        times = replayed_times([spec.at_s or 0.0 for spec in specs], stage.speed_up)
        end_s = _schedule_end_s(bounds, times)
        return [(spec, moment) for spec, moment in zip(specs, times, strict=True) if moment < end_s]
    count += math.ceil(2 * stage.rate * bounds.warmup_s)
    rng = np.random.default_rng([seed, stage.index])
    times = intended_times(stage.arrival, stage.rate, count, rng, stage.burstiness)
    end_s = _schedule_end_s(bounds, times)
    # zip takes a request only if there is a due time for it.
    return [(spec, moment) for moment, spec in zip((t for t in times if t < end_s), requests, strict=False)]


def _schedule_end_s(bounds: Bounds, times: Sequence[float]) -> float:
    """End of the arrivals. The duration counts from the end of the warm-up: its last request or its seconds."""
    last_s = times[bounds.warmup_requests - 1] if bounds.warmup_requests else 0.0
    return max(last_s, bounds.warmup_s) + bounds.seconds


async def _sleep_until(moment_s: float, stop: asyncio.Event) -> bool:
    """Waits until ``moment_s`` of ``time.perf_counter``. Returns whether ``stop`` was set before."""
    delay_s = moment_s - time.perf_counter()
    if delay_s > 0:
        with suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await stop.wait()
    else:
        # Behind schedule, tasks of due requests must still run.
        await asyncio.sleep(0)
    return stop.is_set()


async def _finish(tasks: Sequence[asyncio.Task[None]], deadline_s: Callable[[], float], stop: asyncio.Event) -> None:
    """Waits for ``tasks`` until ``stop`` or a deadline, then cancels the rest. Raises the errors of tasks.

    Args:
        deadline_s: returns a time of ``time.perf_counter``, which may move.
    """
    stopping = asyncio.create_task(stop.wait())
    everything = asyncio.gather(*tasks)
    try:
        while not (everything.done() or stop.is_set()) and (left_s := deadline_s() - time.perf_counter()) > 0:
            await asyncio.wait((everything, stopping), timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        if everything.done():
            await everything
    finally:
        stopping.cancel()
        everything.cancel()
        await asyncio.gather(everything, stopping, *tasks, return_exceptions=True)
