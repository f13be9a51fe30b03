"""One pool of workers: starts workers, replaces dead ones, drains leaving ones.

A call to each worker stays open and fails as soon as its process dies; the owner of the pool judges those that hang.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

from ray.exceptions import RayError

from baton.core.errors import (
    BatonError,
    ConfigError,
    DeadlineError,
    InvalidRequestError,
    UnsupportedModelError,
    WorkerLostError,
)
from baton.core.roles import POOLS
from baton.process.background import race
from cluster.autoscaling.observation import PoolCounts
from cluster.config.config import BatonConfig
from cluster.config.key_changes import worker_keys
from cluster.controller.places import Places
from cluster.controller.pool_history import PoolHistory
from cluster.controller.pool_listener import PoolListener
from cluster.controller.pool_member import ChangeOrigin, PoolMember
from cluster.controller.ray_errors import logged, short_reason
from cluster.controller.shared_processes import SharedProcesses
from cluster.controller.start_problems import explain_failures, explain_wait
from cluster.controller.survivors import FoundWorker, worker_number
from cluster.registry.progress_judge import Standing
from cluster.registry.workers import WorkerState
from cluster.telemetry.cluster_metrics import PoolFigures

logger = logging.getLogger(__name__)

_HOPELESS_NOTICE_S = 5.0
_BUSY_NOTICE_S = 20.0
"""A process may take this long to start; only later is a lack of free resources likely."""
_MAX_BACKOFF_S = 30.0
_MAX_DOUBLINGS = 10.0
"""Limit of the exponent, since 2.0 ** 1024 overflows; the pause has reached its maximum before."""
_MAX_FAILED_ROUNDS = 3
_SHORTEST_DRAIN_TIMEOUT_S = 600.0
_DEAD_KEPT = 5


class WorkerPool:
    """The workers of one role.

    Args:
        actor_class: the actor class to start; :class:`cluster.actors.WorkerActor` except in tests.
        bind_host: address that workers listen on; ``None`` means the address of each worker's node.
        secret: the cluster's secret, for the workers.
        processes: hosts workers in shared processes; ``None`` gives each worker its own process.

    Attributes:
        is_pinned: whether the size was set manually, so that the autoscaler does not change it.
    """

    def __init__(
        self,
        name: str,
        config: BatonConfig,
        listener: PoolListener,
        actor_class: type,
        bind_host: str | None,
        secret: bytes,
        processes: SharedProcesses | None = None,
    ) -> None:
        self.name = name
        self.target = 0
        self.is_pinned = False
        self._config = config
        self._places = Places(name, config)
        self._listener = listener
        self._actor_class = actor_class
        self._bind_host = bind_host
        self._secret = secret
        self._processes = processes
        self._members: dict[str, PoolMember] = {}
        self._dead: list[PoolMember] = []
        self._next_number = 1
        # At least the time limit of a request, so that a drain never cuts one off.
        self._drain_timeout_s = max(_SHORTEST_DRAIN_TIMEOUT_S, config.router.request_timeout_s)
        self._num_start_failures = 0  # in a row
        self._num_spare = 0  # workers beyond the target, while others are replaced
        self._history = PoolHistory()
        self._was_complete = False
        self._fatal: BatonError | None = None
        self._changed = asyncio.Event()

    @property
    def ready(self) -> list[PoolMember]:
        return [member for member in self._members.values() if member.state is WorkerState.READY]

    @property
    def num_ready(self) -> int:
        return len(self.ready)

    @property
    def _failed_rounds(self) -> float:
        """Failed starts in a row per missing worker."""
        return self._num_start_failures / max(1, self._size - self.num_ready)

    @property
    def _failed_starts(self) -> list[PoolMember]:
        """Those of the failed starts in a row that are still known."""
        failed = [member for member in self._dead if member.info is None]
        return failed[-self._num_start_failures :] if self._num_start_failures else []

    @property
    def _size(self) -> int:
        """The number of workers to keep."""
        return self.target + self._num_spare

    @property
    def outdated(self) -> list[PoolMember]:
        """The workers that stay although they have other settings than new ones get."""
        return [member for member in self._members.values() if member.is_outdated and not member.leaving.is_set()]

    def scale(self, target: int) -> None:
        """Sets the pool's target size. Workers start and leave in the background."""
        if (self.target or self._was_complete) and target != self.target:  # the initial size does not count as scaling
            self._history.scalings["up" if target > self.target else "down"] += 1
            logger.info("the pool is scaled from %d to %d workers", self.target, target, extra={"pool": self.name})
        self.target = target
        self._fatal = None
        self._reconcile()

    def use(self, config: BatonConfig, processes: SharedProcesses | None) -> None:
        """Starts workers with another configuration from now on, and keeps no spare one.

        Workers that serve stay, even if they are outdated; those that are starting leave then.

        Args:
            processes: as for the pool, with this configuration.
        """
        self._config, self._processes, self._places = config, processes, Places(self.name, config)
        self._num_start_failures = self._num_spare = 0
        for member in self._members.values():
            member.is_outdated = bool(worker_keys(member.config, config, self.name))
            if member.is_outdated and member.state is WorkerState.STARTING:
                member.leaving.set()
        self._reconcile()

    def keep_spare(self, num_spare: int) -> None:
        """Keeps this many workers beyond the target. With fewer than before, outdated ones leave first."""
        self._num_spare = num_spare
        self._reconcile()

    def take_over(self, found: Sequence[FoundWorker]) -> None:
        """Begins with the configured number of workers, or with more if there are more that serve already.

        A pool that was being upgraded keeps one beyond its size as its spare one.
        """
        for worker in found:
            member = PoolMember.taken_over(worker)
            member.is_outdated = bool(worker_keys(member.config, self._config, self.name))
            self._next_number = max(self._next_number, worker_number(member.worker_id) + 1)
            self._was_complete = True
            self._run(member)
        num_workers = self._config.pool(self.name).workers
        self._num_spare = int(bool(self.outdated) and len(found) > num_workers)
        self.scale(max(num_workers, len(found) - self._num_spare))

    def leave_node(self, node_id: str) -> None:
        """Drains the workers on a node and replaces them elsewhere."""
        for member in list(self._members.values()):
            if member.info is not None and member.info.node_id == node_id and not member.leaving.is_set():
                self._listener.report(f"{member.worker_id} is drained, since its node leaves the cluster")
                member.leaving.set()
                self._reconcile()

    def change_role_from(self, source: WorkerPool, by: ChangeOrigin) -> None:
        """Drains a worker of another pool and moves it into this one with its weights.

        Args:
            by: origin of the decision.

        Raises:
            InvalidRequestError: the other pool has no worker to spare.
        """
        member = next((member for member in reversed(source.ready) if not member.leaving.is_set()), None)
        if member is None or source.target < 2:
            raise InvalidRequestError(
                f"The pool {source.name} cannot give up a worker: its target is {source.target} and "
                f"{source.num_ready} are ready, and at least one must stay.",
                param=source.name,
            )
        if worker_keys(member.config, self._config, *POOLS):
            raise InvalidRequestError(
                f"{member.worker_id} started before the last upgrade, with other settings than {self.name} workers "
                "have now, so it cannot change its role. Scale the pools instead.",
                param=source.name,
            )
        self.target += 1
        source.target -= 1
        self._history.role_changes[by] += 1
        member.next_role = self._add_member(changes_from=member.worker_id)
        member.leaving.set()
        logger.info("a worker of %s changes to %s", source.name, self.name, extra={"worker": member.worker_id})
        self._notify()
        source._notify()

    def judged(self, worker_id: str, standing: Standing, reason: str) -> None:
        """Takes a judgement of a worker's progress; a lost one is replaced. Workers of other pools are ignored."""
        if (member := self._members.get(worker_id)) is not None:
            member.judged(standing, reason)
            self._notify()

    async def wait_until_ready(self, timeout_s: float, max_failed_rounds: int = _MAX_FAILED_ROUNDS) -> None:
        """Waits until all workers are ready.

        Args:
            max_failed_rounds: failed starts in a row for each missing worker, after which the wait ends.

        Raises:
            DeadlineError: they are not ready in time; the message says what the pool waits for.
            WorkerLostError: workers repeatedly die while they start.
            BatonError: a worker reported that it can never start.
        """
        give_up_at = time.monotonic() + timeout_s
        while self.num_ready < self._size:
            changed = self._changed
            if self._fatal is not None:
                raise self._fatal
            if self._failed_rounds >= max_failed_rounds:
                raise WorkerLostError(explain_failures(self.name, self._num_start_failures, self._failed_starts))
            try:
                async with asyncio.timeout(max(0.0, give_up_at - time.monotonic())):
                    await changed.wait()
            except TimeoutError:
                raise DeadlineError(self._why_not_ready(timeout_s)) from None

    async def wait_until_drained(self) -> None:
        """Waits until every worker that leaves is gone."""
        while any(member.leaving.is_set() for member in self._members.values()):
            await self._changed.wait()

    def status(self) -> dict[str, Any]:
        """The target and the workers, including the last few dead ones, JSON-ready."""
        workers = [member.to_dict() for member in (*self._members.values(), *self._dead)]
        known: dict[str, Any] = {"target": self.target, "workers": workers}
        if outdated := self.outdated:
            known["outdated"] = [member.worker_id for member in outdated]
        return known | ({"pinned": True} if self.is_pinned else {})

    def counts(self) -> PoolCounts:
        """The counts that the autoscaler needs."""
        return self._history.counts(self._members.values(), self.target, is_pinned=self.is_pinned)

    def figures(self) -> PoolFigures:
        """The figures for metrics."""
        return self._history.figures(self._members.values(), self.target)

    async def stop(self) -> None:
        """Ends all workers at once, without draining."""
        self.target = self._num_spare = 0
        members = list(self._members.values())
        tasks = [member.task for member in members if member.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(member.kill() for member in members))
        self._members.clear()
        self._notify()

    def _reconcile(self) -> None:
        """Starts missing workers and asks surplus ones to leave."""
        staying = [member for member in reversed(self._members.values()) if not member.leaving.is_set()]
        for _ in range(self._size - len(staying)):
            self._add_member()
        # Pending workers leave first, so that a worker which changes its role in their place stays; then other workers
        # that are not ready; then outdated ones; then the youngest.
        staying.sort(
            key=lambda member: (member.state is WorkerState.READY, not member.is_pending, not member.is_outdated)
        )
        for member in staying[: max(0, len(staying) - self._size)]:
            member.leaving.set()
        self._notify()

    def _add_member(self, changes_from: str = "") -> PoolMember:
        member = PoolMember(f"{self.name}-{self._next_number}", self._config)
        self._next_number += 1
        member.reason = f"replaces {changes_from} once it is drained" if changes_from else ""
        self._run(member, changes_role=bool(changes_from))
        return member

    def _run(self, member: PoolMember, *, changes_role: bool = False) -> None:
        self._members[member.worker_id] = member
        member.task = asyncio.create_task(self._live(member, changes_role=changes_role))

    async def _live(self, member: PoolMember, *, changes_role: bool) -> None:
        """Runs a member from its start to its end."""
        try:
            if member.info is not None:  # it was taken over
                await self._listener.worker_ready(member.info, is_outdated=member.is_outdated)
            else:
                await race(self._bring_up(member, changes_role=changes_role), member.leaving.wait())
            if member.info is not None:
                await race(member.ended(), member.lost(), member.leaving.wait())
                member.state = WorkerState.DRAINING
                self._notify()
                draining = self._listener.drain(member.worker_id, self._drain_timeout_s)
                await race(member.ended(), member.lost(), draining)
                member.is_drained = True
        except (BatonError, RayError) as error:
            member.reason = short_reason(error)
            # If all workers have started before, others may start again: one bad node must not end the pool.
            if isinstance(error, ConfigError | UnsupportedModelError):
                member.reason = error.message
            if isinstance(error, ConfigError | UnsupportedModelError) and not self._was_complete:
                self._fatal = error
                logger.error("a worker can never start: %s", error.message, extra={"worker": member.worker_id})
            else:
                logger.warning("a worker ended: %s", logged(error), extra={"worker": member.worker_id})
        except Exception as error:
            member.reason = f"{type(error).__name__}: {error}"
            logger.exception("a worker ended unexpectedly", extra={"worker": member.worker_id})
        await self._remove(member)

    async def _bring_up(self, member: PoolMember, *, changes_role: bool) -> None:
        if changes_role and await member.receives_process():
            member.reason, begun_s = "", time.monotonic()
            try:
                info = await member.change_role(self.name)
            except BatonError as error:  # a new process may still work
                raise WorkerLostError(f"the worker could not change its role: {error.message}") from error
            durations = self._history.role_changes_s
        else:
            if self._num_start_failures:
                await asyncio.sleep(min(_MAX_BACKOFF_S, 2.0 ** min(_MAX_DOUBLINGS, self._failed_rounds - 1)))
            begun_s = time.monotonic()
            member.create(self._actor_class, self.name, self._bind_host, self._secret, self._processes)
            await self._wait_for_place(member)
            info = await member.start(self._listener.report)
            durations = self._history.starts_s
        await self._listener.worker_ready(info)
        member.info, member.since_s = info, time.monotonic()
        durations.append(member.since_s - begun_s)
        member.state = WorkerState.READY
        self._was_complete = self._was_complete or self.num_ready >= self.target
        self._num_start_failures = 0
        self._history.num_started += 1
        memory = f"; memory: {info.memory.describe()}" if info.memory is not None and info.memory.total else ""
        failure = f"; {info.graph_failure}" if info.graph_failure else ""
        self._listener.report(f"{member.worker_id} is ready at {info.address} ({info.hardware}){memory}{failure}")
        self._notify()

    async def _wait_for_place(self, member: PoolMember) -> None:
        """Waits for Ray to place the actor; when that takes long, says what the nodes lack."""
        placed = asyncio.ensure_future(member.placed())
        try:
            await asyncio.wait({placed}, timeout=_HOPELESS_NOTICE_S)
            if not placed.done() and self._places.has_large_enough():
                await asyncio.wait({placed}, timeout=_BUSY_NOTICE_S - _HOPELESS_NOTICE_S)
            if not placed.done():
                reason = self._places.explain()
                if all(other.reason != reason for other in self._members.values()):  # report each reason once
                    self._listener.report(reason)
                member.reason = reason
                self._notify()
            await placed
            member.reason = ""
        finally:
            placed.cancel()

    async def _remove(self, member: PoolMember) -> None:
        await self._listener.worker_gone(member.worker_id)
        if not member.hand_process_over():
            await member.kill()
        was_serving = member.state is not WorkerState.STARTING
        self._members.pop(member.worker_id, None)
        member.state = WorkerState.DEAD
        if not member.leaving.is_set():
            phase = "hanging" if member.hangs.is_set() else "serving" if was_serving else "starting"
            self._history.failures[phase] += 1
            what = "is lost" if was_serving else "could not be started"
            self._listener.report(f"{member.worker_id} {what}: {member.reason or 'its process ended'}")
            self._num_start_failures += not was_serving
            self._dead = [*self._dead, member][-_DEAD_KEPT:]
            if self._fatal is None:  # a replacement is needed
                self._reconcile()
        self._notify()

    def _why_not_ready(self, timeout_s: float) -> str:
        members = (*self._members.values(), *self._failed_starts)
        why = explain_wait(members, self._places.explain() if any(member.is_pending for member in members) else "")
        return f"After {timeout_s:g} s, {self.num_ready} of {self._size} {self.name} workers are ready. {why}"

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
