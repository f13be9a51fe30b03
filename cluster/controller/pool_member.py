"""One worker of a pool as a Ray actor: its placement, start, end and shutdown."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import asdict
from enum import StrEnum
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from baton.core.errors import BatonError, ConfigError, WorkerLostError
from baton.process.worker_environment import carried_variables
from cluster.config.config import BatonConfig
from cluster.controller.placement import actor_options, pool_resources
from cluster.controller.shared_processes import SharedActor, SharedProcesses
from cluster.controller.survivors import FoundWorker, Kind, survival_options
from cluster.registry.progress_judge import Standing
from cluster.registry.workers import WorkerInfo, WorkerState

logger = logging.getLogger(__name__)

ROLES = {"prefill": "prefill_worker.role:PrefillRole", "decode": "decode_worker.role:DecodeRole"}

_MAX_CONCURRENT_CALLS = 1000
"""``start``, ``wait`` and ``stop`` overlap, and calls stay open after their callers have given up or died."""
_STOP_TIMEOUT_S = 15.0
_ANSWER_S = 10.0
"""A busy machine may be late."""
_ASK_EVERY_S = 2.0


class ChangeOrigin(StrEnum):
    """The origin of a role change; the values are those of a metric label."""

    AUTOSCALER = "autoscaler"
    OPERATOR = "operator"


class PoolMember:
    """A worker from the decision to start it until its end. The pool sets its ``state``.

    Attributes:
        config: the configuration with which it starts.
        is_outdated: whether workers that start now get other settings.
        reason: why the worker is not ready, or why it ended.
        leaving: set this to make the worker leave.
        next_role: the member of the other pool that takes over this worker's process.
        is_drained: whether no request uses the worker any more.
        hangs: set when the worker is judged as lost although its process may live.
    """

    def __init__(self, worker_id: str, config: BatonConfig) -> None:
        self.worker_id = worker_id
        self.config = config
        self.is_outdated = False
        self.state = WorkerState.STARTING
        self.reason = ""
        self.info: WorkerInfo | None = None
        self.leaving = asyncio.Event()
        self.next_role: PoolMember | None = None
        self.is_drained = False
        self.hangs = asyncio.Event()
        self.since_s = time.monotonic()
        self.task: asyncio.Task[None] | None = None
        self._actor: Any = None
        self._is_decided = False  # whether the actor was placed, or has failed to be
        self._role_change_decided = asyncio.Event()

    @classmethod
    def taken_over(cls, found: FoundWorker) -> PoolMember:
        """A member whose process serves already."""
        member = cls(found.info.worker_id, found.config)
        member.state, member.info = WorkerState.READY, found.info
        member._actor, member._is_decided = found.actor, True
        return member

    @property
    def is_pending(self) -> bool:
        """Whether Ray was asked for the actor, and its process has neither started nor failed to start."""
        return self._actor is not None and not self._is_decided

    def create(
        self,
        actor_class: type,
        pool: str,
        bind_host: str | None,
        secret: bytes,
        processes: SharedProcesses | None = None,
    ) -> None:
        """Asks Ray for the actor.

        Args:
            processes: hosts the worker in a shared process; ``None`` gives it its own process.

        Raises:
            ConfigError: Ray refuses the pool's resources or labels.
        """
        if processes is not None:
            self._actor = processes.place(self.worker_id, pool, bind_host)
            return
        config = self.config
        options = actor_options(pool_resources(config, pool), is_local=config.ray.is_local)
        try:
            options |= survival_options(config.ray, Kind.WORKER)
            remote_class: Any = ray.remote(actor_class).options(max_concurrency=_MAX_CONCURRENT_CALLS, **options)
            arguments = (self.worker_id, pool, ROLES[pool], config.to_dict(), bind_host, secret, carried_variables())
            self._actor = remote_class.remote(*arguments)
        except ValueError as error:
            raise ConfigError(f"Ray refuses {pool}.resources: {error}") from error

    async def placed(self) -> None:
        """Waits until the actor's process runs. Raises ``RayError`` if it cannot be created."""
        try:
            await _result(self._actor.__ray_ready__.remote())
        except RayError:
            self._is_decided = True
            raise
        self._is_decided = True

    def hand_process_over(self) -> bool:
        """Gives the process to ``next_role``. Returns False if it was not drained or that member no longer needs it."""
        next_role, self.next_role = self.next_role, None
        if next_role is None:
            return False
        wanted = self.is_drained and next_role.state is WorkerState.STARTING and not next_role.leaving.is_set()
        if wanted:
            next_role._actor, self._actor = self._actor, None
            next_role._is_decided = True
        next_role._role_change_decided.set()
        return wanted

    async def receives_process(self) -> bool:
        """Waits for the process of another member. Returns False if a new process must be started instead."""
        await self._role_change_decided.wait()
        return self._actor is not None

    async def change_role(self, pool: str) -> WorkerInfo:
        """Makes the received process a worker of ``pool``. Raises ``BatonError`` or ``RayError`` if that fails."""
        return await self._served(self._actor.change_role.remote(self.worker_id, pool, ROLES[pool]))

    async def start(self, report: Callable[[str], None]) -> WorkerInfo:
        """Loads the model and serves; passes lines of progress on. Raises ``BatonError`` or ``RayError`` on failure."""
        progress = asyncio.create_task(self._report_progress(report))
        try:
            return await self._served(self._actor.start.remote())
        finally:
            progress.cancel()

    async def _served(self, call: Any) -> WorkerInfo:
        """The result of a call after which the worker serves.

        Raises:
            WorkerLostError: the process is silent: it neither returns nor answers other calls meanwhile.
            BatonError, RayError: the call has failed.
        """
        result, limit_s = asyncio.ensure_future(_result(call)), self.config.ray.attempt_timeout_s
        try:
            while not await _is_done(result, _ASK_EVERY_S):
                if not await self.answers(limit_s) and not await _is_done(result, _ASK_EVERY_S):
                    raise WorkerLostError(f"its process has been silent for {limit_s:g} s")
            return WorkerInfo.from_dict(result.result())
        finally:
            result.cancel()

    async def _report_progress(self, report: Callable[[str], None]) -> None:
        next_progress = getattr(self._actor, "next_progress", None)  # simulated workers report none
        try:
            while next_progress is not None and (line := await next_progress.remote()) is not None:
                report(line)
        except RayError as error:  # the call of start fails, too, and its error says more
            logger.debug("the progress of a worker is unknown: %s", error)

    async def ended(self) -> None:
        """Waits while the process lives; raises ``RayError`` as soon as it dies."""
        await _result(self._actor.wait.remote())

    async def answers(self, timeout_s: float = _ANSWER_S) -> bool:
        """Asks the process whether it lives, since its death is noticed a moment later."""
        if self._actor is None:
            return False
        try:
            async with asyncio.timeout(timeout_s):
                await _result(self._actor.__ray_ready__.remote())
        except (RayError, TimeoutError):
            return False
        return True

    def judged(self, standing: Standing, reason: str) -> None:
        """Takes a judgement of the worker's progress."""
        self.reason = reason
        if standing is Standing.LOST:
            self.hangs.set()
        elif self.state in (WorkerState.READY, WorkerState.SUSPECTED):
            self.state = WorkerState.READY if standing is Standing.TRUSTED else WorkerState.SUSPECTED

    async def lost(self) -> None:
        """Waits until the worker is judged as lost, and raises :class:`WorkerLostError`."""
        await self.hangs.wait()
        raise WorkerLostError(self.reason)

    async def kill(self) -> None:
        """Ends the process: gracefully if it serves and is not suspected, otherwise at once."""
        is_pending = self.is_pending
        actor, self._actor = self._actor, None
        if actor is None:
            return
        try:
            if self.state in (WorkerState.READY, WorkerState.DRAINING) and not self.hangs.is_set():
                async with asyncio.timeout(_STOP_TIMEOUT_S):
                    await _result(actor.stop.remote())
        except (BatonError, RayError, TimeoutError):
            logger.info("a worker did not stop by itself", extra={"worker": self.worker_id})
        finally:
            if isinstance(actor, SharedActor):
                await actor.release(is_pending=is_pending)
            else:
                ray.kill(actor, no_restart=True)

    def to_dict(self) -> dict[str, Any]:
        """The worker's status, JSON-ready."""
        is_dead = self.state is WorkerState.DEAD
        known = {
            "id": self.worker_id,
            "state": str(self.state),
            "reason": self.reason,
            "uptime_s": None if is_dead else round(time.monotonic() - self.since_s, 1),
            "is_pending": self.is_pending,
        }
        if self.info is None:
            return known
        known |= {name: getattr(self.info, name) for name in ("address", "pid", "node", "device", "graph_failure")}
        return known | ({} if self.info.memory is None else {"memory": asdict(self.info.memory)})


async def _is_done(future: asyncio.Future[Any], timeout_s: float) -> bool:
    """Waits for a future, at most for this time."""
    return bool((await asyncio.wait({future}, timeout=timeout_s))[0])


async def _result(reference: Any) -> Any:
    """The result of an actor call; a ``BatonError`` of the actor is raised as such."""
    try:
        return await reference
    except RayTaskError as error:
        if isinstance(error.cause, BatonError):
            raise error.cause from None
        raise
