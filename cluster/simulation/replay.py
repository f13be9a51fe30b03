"""Replays a trace against the real router and simulated workers, in virtual time."""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from baton.core.errors import InternalError, OverloadedError
from baton.core.outcomes import REJECTED
from baton.process.background import BackgroundTasks
from cluster.config.config import BatonConfig
from cluster.simulation.control_plane import VirtualControlPlane
from cluster.simulation.profile import TimingProfile
from cluster.simulation.report import FORMAT, VERSION, ReplayedRequest, by_class
from cluster.simulation.sending import send
from cluster.simulation.virtual_loop import run_virtually
from cluster.simulation.workload import Arrival

_SETTLE_S = 60.0
"""Time after the last request before blocks are counted, in which unclaimed KV expires."""


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """Settings of a replay.

    Attributes:
        warmup_s: requests that arrive earlier are served but left out of all figures.
        poll_s: interval at which step samples are fetched; a real router fetches them every second.
        max_missed: number of counted requests that may miss their targets. The next miss ends the replay, and its
            figures cover the requests that had ended by then. ``None`` runs the replay to its end.
    """

    warmup_s: float = 0.0
    poll_s: float = 5.0
    max_missed: int | None = None


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """The result of a replay.

    Attributes:
        document: the report, JSON-ready.
        requests: the counted requests.
    """

    document: dict[str, Any]
    requests: list[ReplayedRequest]


def replay(
    config: BatonConfig, profile: TimingProfile, arrivals: Sequence[Arrival], settings: ReplaySettings
) -> ReplayResult:
    """Replays the arrivals in virtual time.

    Raises:
        InternalError: blocks have leaked, a request failed unexpectedly, or all tasks wait with no timer set.
    """
    started_s = time.monotonic()

    async def run() -> ReplayResult:
        replaying = _Replay(config, profile, settings)
        return ReplayResult(await replaying.run(arrivals), replaying.requests)

    result = run_virtually(run)
    result.document["replay"]["wall_s"] = round(time.monotonic() - started_s, 3)
    return result


class _Replay:
    def __init__(self, config: BatonConfig, profile: TimingProfile, settings: ReplaySettings) -> None:
        self._loop = asyncio.get_running_loop()
        self._settings = settings
        self._slo_classes = {slo.name: slo for slo in config.slo.to_classes().all}
        self._plane = VirtualControlPlane(config, profile, settings.poll_s)
        self.requests: list[ReplayedRequest] = []
        self._tasks = BackgroundTasks()
        self._failures: deque[BaseException] = deque(maxlen=1)
        self._num_missed = 0
        self._chance = random.Random(config.simulation.seed)
        self._missed_too_many = asyncio.Event()

    async def run(self, arrivals: Sequence[Arrival]) -> dict[str, Any]:
        await self._plane.start()
        origin_s = self._loop.time()
        running: set[asyncio.Task[None]] = set()
        for number, arrival in enumerate(arrivals):
            delay_s = origin_s + arrival.at_s - self._loop.time()
            if delay_s > 0:
                await asyncio.sleep(delay_s)
            if self._missed_too_many.is_set():
                break
            task = self._tasks.spawn(self._send(f"replay-{number}", arrival, origin_s + self._settings.warmup_s))
            running.add(task)
            task.add_done_callback(running.discard)
        await self._until_finished(running)
        if self._failures:
            raise InternalError(f"a replayed request failed: {self._failures[0]!r}") from self._failures[0]
        ended_s = self._loop.time()
        hours = self._plane.cluster.worker_hours()
        await self._plane.stop()
        await asyncio.sleep(_SETTLE_S)
        if leaks := self._plane.cluster.leaks():
            raise InternalError(f"{len(leaks)} blocks leaked in the simulation; the first: {leaks[0]}")
        seconds = (arrivals[-1].at_s - self._settings.warmup_s) if arrivals else 0.0
        return {
            "format": FORMAT,
            "version": VERSION,
            "replay": {
                "requests_per_s": round(len(self.requests) / seconds, 4) if seconds > 0 else 0.0,
                "virtual_s": round(ended_s - origin_s, 3),
            },
            "classes": by_class(self.requests, seconds),
            "worker_hours": {pool: round(value, 6) for pool, value in hours.items()},
            "workers": self._plane.sizes(),
            "sizes": [[round(at_s - origin_s, 3), pool, size] for at_s, pool, size in self._plane.cluster.sizes],
            "prediction_errors": self._plane.metrics.prediction_errors.summary(),
            "preemptions": sum(worker.engine.num_preemptions for worker in self._plane.cluster.workers),
        }

    async def _until_finished(self, running: set[asyncio.Task[None]]) -> None:
        """Waits for the requests in progress, and cancels them if too many have missed their targets."""
        if not running:
            return
        over = asyncio.ensure_future(asyncio.wait(set(running)))
        missed = asyncio.ensure_future(self._missed_too_many.wait())
        await asyncio.wait((over, missed), return_when=asyncio.FIRST_COMPLETED)
        missed.cancel()
        if self._missed_too_many.is_set():
            for task in list(running):
                task.cancel()
        await over

    async def _send(self, request_id: str, arrival: Arrival, counted_from_s: float) -> None:
        slo = self._slo_classes[arrival.slo]
        try:
            router = self._chance.choice(self._plane.routers)  # as the kernel chooses the router of a connection
            answer = await send(router, request_id, arrival.prompt_token_ids, arrival.params, slo)
        except Exception as error:  # noqa: BLE001 - raised where the replay ends
            self._failures.append(error)
            return
        if answer.timeline.origin_s >= counted_from_s:
            outcome = REJECTED if isinstance(answer.error, OverloadedError) else answer.outcome
            num_prompt, now_s = len(arrival.prompt_token_ids), self._loop.time()
            request = ReplayedRequest.of(answer.timeline, slo, outcome, num_prompt, answer.num_tokens, now_s)
            self.requests.append(request)
            self._num_missed += request.is_met is False
            if self._settings.max_missed is not None and self._num_missed > self._settings.max_missed:
                self._missed_too_many.set()
