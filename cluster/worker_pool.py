"""One pool of Ray actors: starts them, watches them, replaces the dead, drains those that leave.

Nothing polls: a call to each actor's ``wait`` stays open, and fails the moment that its process dies.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import ray
from ray.exceptions import RayError

from cluster.config import BatonConfig
from cluster.placement import actor_options, explain_pending, living_nodes
from cluster.registry import WorkerInfo, WorkerState
from engine.errors import BatonError, ConfigError, DeadlineError, UnsupportedModelError, WorkerLostError

logger = logging.getLogger(__name__)

ROLES = {"prefill": "prefill_worker.role:PrefillRole", "decode": "decode_worker.role:DecodeRole"}

_PENDING_NOTICE_S = 5.0
_MAX_BACKOFF_S = 30.0
_MAX_START_FAILURES = 3
_DRAIN_TIMEOUT_S = 600.0
_STOP_TIMEOUT_S = 15.0
_DEAD_KEPT = 5


class PoolListener(Protocol):
    """Who must hear of a pool's changes: the router, through the controller."""

    async def worker_ready(self, info: WorkerInfo) -> None: ...

    async def worker_gone(self, worker_id: str) -> None: ...

    async def drain(self, worker_id: str, timeout_s: float) -> None:
        """Returns when no request uses the worker any more."""
        ...

    def report(self, text: str) -> None:
        """Progress, for whoever starts the cluster."""
        ...


@dataclass(slots=True, eq=False)
class PoolMember:
    """One worker, from the decision to start it until its end."""

    worker_id: str
    state: WorkerState = WorkerState.STARTING
    actor: Any = None
    info: WorkerInfo | None = None
    task: asyncio.Task[None] | None = None
    reason: str = ""
    since_s: float = field(default_factory=time.monotonic)
    leave: asyncio.Event = field(default_factory=asyncio.Event)


class WorkerPool:
    """The workers of one role.

    Args:
        actor_class: what to start; :class:`cluster.worker_host.WorkerHost` but for tests.
        bind_host: gives the address that a new worker binds.
    """

    def __init__(
        self,
        name: str,
        config: BatonConfig,
        listener: PoolListener,
        actor_class: type,
        bind_host: Callable[[], str],
    ) -> None:
        self.name = name
        self.target = 0
        self._config = config
        self._pool = config.pool(name)
        self._listener = listener
        self._actor_class = actor_class
        self._bind_host = bind_host
        self._members: dict[str, PoolMember] = {}
        self._dead: list[PoolMember] = []
        self._next_number = 1
        self._num_failures = 0  # in a row
        self._fatal: BatonError | None = None
        self._changed = asyncio.Event()

    @property
    def num_ready(self) -> int:
        return sum(member.state is WorkerState.READY for member in self._members.values())

    def scale(self, target: int) -> None:
        """Sets how many workers the pool shall have; they come and go in the background."""
        self.target = target
        self._reconcile()

    async def wait_until_ready(self, timeout_s: float) -> None:
        """Returns when the pool has its workers.

        Raises:
            DeadlineError: it does not have them in time; the message says what it waits for.
            BatonError: a worker said why it can never start.
        """
        give_up_at = time.monotonic() + timeout_s
        while self.num_ready < self.target:
            changed = self._changed
            if self._fatal is not None:
                raise self._fatal
            if self._num_failures >= _MAX_START_FAILURES:
                raise WorkerLostError(f"{self.name} workers keep dying at start: {self._dead[-1].reason}")
            try:
                await asyncio.wait_for(changed.wait(), max(0.0, give_up_at - time.monotonic()))
            except TimeoutError:
                raise DeadlineError(self._why_not_ready(timeout_s)) from None

    def status(self) -> dict[str, Any]:
        """JSON-ready: target and workers, the last few dead ones included."""
        return {
            "target": self.target,
            "workers": [
                {
                    "id": member.worker_id,
                    "state": str(member.state),
                    "reason": member.reason,
                    "uptime_s": round(time.monotonic() - member.since_s, 1),
                    **(
                        {
                            "address": member.info.address,
                            "pid": member.info.pid,
                            "node": member.info.node,
                            "device": member.info.device,
                        }
                        if member.info
                        else {}
                    ),
                }
                for member in (*self._members.values(), *self._dead)
            ],
        }

    async def stop(self) -> None:
        """Ends all workers at once, without draining."""
        self.target = 0
        members = list(self._members.values())
        for member in members:
            if member.task is not None:
                member.task.cancel()
        await asyncio.gather(*(self._kill(member) for member in members), return_exceptions=True)

    def _reconcile(self) -> None:
        staying = [m for m in self._members.values() if not m.leave.is_set()]
        for _ in range(self.target - len(staying)):
            self._add_member()
        # Those that serve nobody yet leave first, then the youngest.
        leaving = sorted(staying, key=lambda m: (m.state is WorkerState.READY, -m.since_s))
        for member in leaving[: max(0, len(staying) - self.target)]:
            member.leave.set()
        self._notify()

    def _add_member(self) -> None:
        member = PoolMember(f"{self.name}-{self._next_number}")
        self._next_number += 1
        self._members[member.worker_id] = member
        member.task = asyncio.create_task(self._live(member))

    async def _live(self, member: PoolMember) -> None:
        """A member's whole life."""
        try:
            await self._start(member)
            await self._serve(member)
        except (ConfigError, UnsupportedModelError) as error:
            self._fatal = error
            member.reason = error.message
        except (BatonError, RayError) as error:
            # Ray puts the remote traceback first and the error itself last.
            member.reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
            logger.warning("worker %s ended: %s", member.worker_id, error)
        await self._bury(member)

    async def _start(self, member: PoolMember) -> None:
        if self._num_failures:
            await asyncio.sleep(min(_MAX_BACKOFF_S, 2.0 ** (self._num_failures - 1)))
        # A dozen calls at once: start, wait and stop overlap.
        actor_class: Any = ray.remote(self._actor_class).options(
            max_concurrency=16, **actor_options(self._pool.resources)
        )
        member.actor = actor_class.remote(
            member.worker_id, self.name, ROLES[self.name], self._config.to_dict(), self._bind_host()
        )
        await self._wait_for_place(member)
        started = asyncio.ensure_future(member.actor.start.remote())
        await asyncio.wait({started})
        member.info = WorkerInfo.from_dict(_unwrap(started))
        member.state, member.reason, member.since_s = WorkerState.READY, "", time.monotonic()
        self._num_failures = 0
        await self._listener.worker_ready(member.info)
        self._listener.report(f"{member.worker_id} is ready at {member.info.address} ({member.info.device})")
        self._notify()

    async def _wait_for_place(self, member: PoolMember) -> None:
        """Waits for Ray to place the actor; when that takes long, says what the nodes lack."""
        placed = asyncio.ensure_future(member.actor.__ray_ready__.remote())
        await asyncio.wait({placed}, timeout=_PENDING_NOTICE_S)
        if not placed.done():
            member.reason = explain_pending(self.name, self._pool.resources, living_nodes(ray.nodes()))
            self._listener.report(member.reason)
            self._notify()
            await asyncio.wait({placed})
            member.reason = ""
        _unwrap(placed)

    async def _serve(self, member: PoolMember) -> None:
        """Until the process dies or the member is asked to leave; then drains it."""
        alive = asyncio.ensure_future(member.actor.wait.remote())
        leave = asyncio.create_task(member.leave.wait())
        try:
            await asyncio.wait({alive, leave}, return_when=asyncio.FIRST_COMPLETED)
            if alive.done():
                _unwrap(alive)
                return
            member.state = WorkerState.DRAINING
            self._notify()
            drained = asyncio.create_task(self._listener.drain(member.worker_id, _DRAIN_TIMEOUT_S))
            await asyncio.wait({alive, drained}, return_when=asyncio.FIRST_COMPLETED)
            drained.cancel()
        finally:
            leave.cancel()

    async def _bury(self, member: PoolMember) -> None:
        left_on_purpose = member.leave.is_set()
        await self._listener.worker_gone(member.worker_id)
        await self._kill(member)
        self._members.pop(member.worker_id, None)
        member.state = WorkerState.DEAD
        if not left_on_purpose:
            self._num_failures += 1
            self._dead = [*self._dead, member][-_DEAD_KEPT:]
        if self._fatal is None:
            self._reconcile()
        self._notify()

    async def _kill(self, member: PoolMember) -> None:
        if member.actor is None:
            return
        try:
            await asyncio.wait_for(asyncio.ensure_future(member.actor.stop.remote()), _STOP_TIMEOUT_S)
        except (RayError, TimeoutError, asyncio.CancelledError):
            logger.info("worker %s did not stop by itself", member.worker_id)
        finally:
            ray.kill(member.actor, no_restart=True)
            member.actor = None

    def _why_not_ready(self, timeout_s: float) -> str:
        reasons = [m.reason for m in (*self._members.values(), *self._dead) if m.reason]
        return f"After {timeout_s:g} s {self.num_ready} of {self.target} {self.name} workers are ready. " + (
            "\n".join(dict.fromkeys(reasons)) if reasons else "The others are still loading."
        )

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _unwrap(future: asyncio.Future[Any]) -> Any:
    """The result of an actor call; an error that the actor raised comes back as its own class."""
    try:
        return future.result()
    except ray.exceptions.RayTaskError as error:
        cause = error.cause if isinstance(error.cause, BatonError) else None
        raise cause or error from None
