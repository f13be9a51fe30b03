"""Watches the progress of workers: asks each one regularly, and reports changes of its standing."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol

from baton.core.errors import BatonError, DeadlineError, WorkerLostError
from baton.core.steps import StepProgress
from baton.process.background import BackgroundTasks
from cluster.registry.liveness_config import LivenessConfig
from cluster.registry.progress_judge import ProgressJudge, Standing

logger = logging.getLogger(__name__)

_PERIOD_S = 0.5
_PER_WORKER_S = 0.002
"""Above 250 workers, the period grows: a ping takes a fraction of a millisecond."""
_LATE_SHARE = 1 / 6
"""Share of ``suspect_after`` by which a sleep may be late; the rest of a longer delay is this process's own."""
_CHECK_S = 0.5
"""How long a failed request waits to learn whether its worker is there at all. Longer silence is for the watch."""


class Watched(Protocol):
    """The part of :class:`cluster.registry.worker_client.WorkerClient` that a watch needs."""

    async def ping(self, timeout_s: float) -> StepProgress:
        """Raises ``BatonError`` without an answer."""
        ...

    async def probe(self, timeout_s: float) -> None:
        """Makes the worker compute a token. Raises ``BatonError`` if it does not."""
        ...


class _Entry:
    """One watched worker."""

    def __init__(self, client: Watched, judge: ProgressJudge) -> None:
        self.client = client
        self.judge = judge
        self.asking: asyncio.Task[None] | None = None


class ProgressWatch:
    """Judges workers by their progress, in the event loop of the router or the controller.

    Args:
        judged: called when a worker's standing changes, with its id, the standing and the reason.
        clock: monotonic seconds.
        what: what the log calls a worker, if others than workers are watched.
    """

    def __init__(
        self,
        config: LivenessConfig,
        judged: Callable[[str, Standing, str], None],
        clock: Callable[[], float] = time.monotonic,
        what: str = "worker",
    ) -> None:
        self._config = config
        self._judged = judged
        self._what = what
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self._background = BackgroundTasks()
        # The time for which this process has listened. It stands still while the event loop is blocked or the machine
        # sleeps, since all workers look silent then.
        self._listened_s = 0.0

    def add(self, worker_id: str, client: Watched) -> None:
        """Begins to watch a worker. Idempotent."""
        if worker_id not in self._entries:
            self._entries[worker_id] = _Entry(client, ProgressJudge(self._config, self._listened_s))

    def remove(self, worker_id: str) -> None:
        """Ends the watch of a worker. Unknown workers are ignored."""
        self._entries.pop(worker_id, None)

    async def check(self, worker_id: str) -> None:
        """Asks a worker now, and judges it. Returns after half a second at the latest; ignores unknown workers."""
        entry = self._entries.get(worker_id)
        if entry is not None and entry.judge.standing is Standing.TRUSTED:
            await asyncio.wait({self._ask(worker_id, entry)}, timeout=_CHECK_S)

    async def run(self) -> None:
        """Watches until cancelled."""
        while True:
            entries = list(self._entries.items())
            period_s = self._period_s(len(entries))
            for worker_id, entry in entries:
                try:
                    self._look(worker_id, entry)
                except Exception:
                    logger.exception("a %s could not be judged", self._what, extra={"worker": worker_id})
                await self._sleep(period_s / len(entries))
            if not entries:
                await self._sleep(period_s)

    def _look(self, worker_id: str, entry: _Entry) -> None:
        self._judge(worker_id, entry)
        if entry.judge.wants_probe(self._listened_s):
            entry.judge.probing(self._listened_s)
            self._background.spawn(self._probe(entry))
        self._ask(worker_id, entry)

    def _period_s(self, num_workers: int) -> float:
        """The time between two pings of a worker, short enough to notice a hang soon after ``suspect_after``."""
        wanted_s = max(_PERIOD_S, _PER_WORKER_S * num_workers)
        return min(wanted_s, self._config.suspect_after * 2 / 3)

    async def _sleep(self, seconds: float) -> None:
        begun_s = self._clock()
        await asyncio.sleep(seconds)
        self._listened_s += min(self._clock() - begun_s, seconds + self._config.suspect_after * _LATE_SHARE)

    def _judge(self, worker_id: str, entry: _Entry) -> None:
        if self._entries.get(worker_id) is not entry:
            return
        before = entry.judge.standing
        standing = entry.judge.judge(self._listened_s)
        if standing is not before:
            level = logging.INFO if standing is Standing.TRUSTED else logging.WARNING
            reason = f": {entry.judge.reason}" if entry.judge.reason else " again"
            logger.log(level, "the %s is %s%s", self._what, standing, reason, extra={"worker": worker_id})
            self._judged(worker_id, standing, entry.judge.reason)

    def _ask(self, worker_id: str, entry: _Entry) -> asyncio.Task[None]:
        """Pings the worker, unless a ping is on its way."""
        if entry.asking is None or entry.asking.done():
            entry.judge.asked(self._listened_s)
            entry.asking = self._background.spawn(self._ping(worker_id, entry))
        return entry.asking

    async def _ping(self, worker_id: str, entry: _Entry) -> None:
        try:
            progress = await entry.client.ping(self._config.suspect_after)
        except WorkerLostError as error:
            entry.judge.refused(error.message)
        except BatonError as error:
            logger.debug("a %s did not answer a ping: %s", self._what, error.message, extra={"worker": worker_id})
        else:
            entry.judge.answered(progress, self._listened_s)
        self._judge(worker_id, entry)

    async def _probe(self, entry: _Entry) -> None:
        try:
            await entry.client.probe(self._config.suspect_after + self._config.replace_after)
        except (DeadlineError, WorkerLostError):
            entry.judge.probe_failed()
        except BatonError as error:
            entry.judge.probe_failed(f"it cannot compute a token: {error.message}")
        else:
            entry.judge.proved(self._listened_s)
