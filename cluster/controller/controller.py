"""The Ray actor that owns the cluster: the router and both pools. It decides nothing about requests."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from typing import Any

from ray.exceptions import RayError

from baton.core.errors import BatonError, ConfigError, InvalidRequestError, NotFoundError
from baton.core.logs import configure_logging
from baton.core.roles import DECODE, POOLS
from baton.engine.models.model_source import resolve_model
from baton.rpc.credentials import create_secret
from cluster.actors import WorkerActor
from cluster.autoscaling.observation import PoolCounts
from cluster.config.config import BatonConfig
from cluster.config.key_changes import plan_upgrade
from cluster.controller.node_watch import NodeWatch
from cluster.controller.pool_member import ChangeOrigin
from cluster.controller.rolling_upgrade import RollingUpgrade
from cluster.controller.router_group import RouterGroup
from cluster.controller.settling import settle
from cluster.controller.shared_processes import simulated_processes
from cluster.controller.survivors import Survivors
from cluster.controller.worker_agreement import WorkerAgreement
from cluster.controller.worker_pool import WorkerPool
from cluster.nodes.node_labels import POOL_LABEL
from cluster.registry.progress_judge import Standing
from cluster.registry.progress_watch import ProgressWatch
from cluster.registry.worker_client import WorkerClient
from cluster.registry.workers import WorkerInfo
from cluster.telemetry.cluster_metrics import PoolFigures

logger = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"


class Controller:
    """Implements :class:`cluster.controller.worker_pool.PoolListener`.

    Args:
        config: the cluster's configuration, as a dictionary.
        worker_class: the actor class that the pools start.
        variables: those of the user's process, for all processes of the cluster.
        survivors: what an earlier controller has left, to be taken over.
    """

    def __init__(
        self,
        config: dict[str, Any],
        worker_class: type = WorkerActor,
        variables: Mapping[str, str] | None = None,
        survivors: Survivors | None = None,
    ) -> None:
        os.environ.update(variables or {})  # Ray started this process with the head's environment
        self._config = BatonConfig.from_dict(config)
        configure_logging(self._config.log, "controller")
        # Workers of a local cluster stay private to the machine; on several machines they must reach each other.
        bind_host = _LOOPBACK if self._config.ray.is_local else None
        self._follows_another = survivors is not None
        self._survivors = survivors or Survivors(create_secret(), (), ())
        self._secret = self._survivors.secret
        processes = simulated_processes(self._config, self._secret)
        self._pools = {
            name: WorkerPool(name, self._config, self, worker_class, bind_host, self._secret, processes)
            for name in POOLS
        }
        self._agreement = WorkerAgreement()
        self._upgrade = RollingUpgrade(self._pools, self._agreement, self._secret, self.report)
        self._is_upgrading = False
        self._leftovers: asyncio.Task[None] | None = None
        self._infos = {worker.info.worker_id: worker.info for worker in self._survivors.workers}
        self._routers = RouterGroup(self._config, self._secret, self._infos, self.report)
        self._watch = ProgressWatch(self._config.liveness, self._judged)
        self._clients: dict[str, WorkerClient] = {}  # of the watch
        self._watching: asyncio.Task[None] | None = None
        self._reports: asyncio.Queue[str] = asyncio.Queue()
        self._num_reports = 0
        self._router_task: asyncio.Task[None] | None = None
        self._nodes = NodeWatch(self._leave_node)
        self._nodes_task: asyncio.Task[None] | None = None
        self._failed: asyncio.Future[None] = asyncio.get_event_loop().create_future()

    async def start(self) -> str:
        """Starts router and workers, or takes over those that are left; returns the endpoint's URL.

        Raises:
            BatonError: a part cannot start; the message says which and why.
        """
        self._config.security.credentials(self._secret)  # reports wrong certificates before anything starts
        self._watching = asyncio.create_task(self._watch.run())
        await asyncio.to_thread(resolve_model, self._config.model, self.report)
        if not self._config.ray.is_local:
            self._nodes_task = asyncio.create_task(self._nodes.run())
        for name, pool in self._pools.items():
            pool.take_over(self._survivors.of_pool(name))
        endpoint = await self._bring_up_router()
        timeout_s = self._config.ray.start_timeout_s
        waits = [asyncio.create_task(pool.wait_until_ready(timeout_s)) for pool in self._pools.values()]
        try:
            await asyncio.gather(*waits)
        finally:
            for task in waits:
                task.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        self._router_task = asyncio.create_task(self._watch_router())
        if any(pool.outdated for pool in self._pools.values()):
            self._leftovers = asyncio.create_task(self._replace_leftovers())
        return endpoint

    async def _replace_leftovers(self) -> None:
        """Replaces workers that an interrupted upgrade has left."""
        self._is_upgrading = True
        try:
            await self._upgrade.replace_outdated(self._config.ray.start_timeout_s)
        except BatonError as error:
            for pool in self._pools.values():
                pool.keep_spare(0)
            self.report(f"workers that an interrupted upgrade has left could not be replaced: {error.message}")
        finally:
            self._is_upgrading = False

    async def _bring_up_router(self) -> str:
        survivors = self._survivors
        if survivors.routers:
            endpoint = survivors.routers[0].endpoint
            what = "the router" if len(survivors.routers) == 1 else f"{len(survivors.routers)} routers"
            self.report(f"taking over {what} at {endpoint} and {len(survivors.workers)} workers")
            return await self._routers.take_over(survivors.routers)
        if survivors.workers:
            self.report(f"taking over {len(survivors.workers)} workers; the router is lost, and another one is started")
        else:
            self.report("starting the router and the workers; each worker loads the model")
        return await self._routers.start(follows_others=self._follows_another)

    async def _watch_router(self) -> None:
        try:
            await self._routers.watch()
        except (BatonError, RayError) as error:
            self._fail(error)

    def _fail(self, error: BatonError | RayError) -> None:
        if not self._failed.done():
            self._failed.set_exception(error)
            self._failed.exception()  # marks it as retrieved: there may be no caller of wait

    async def reload(self, config: dict[str, Any]) -> None:
        """Gives the router the API keys and SLO classes of ``config``, and to those that replace it.

        Raises:
            BatonError: they cannot be used, or an upgrade runs; nothing has changed.
        """
        self._refuse_during_upgrade()
        new = BatonConfig.from_dict(config)
        new.security.credentials(self._secret)  # names files with which no worker could start
        await self._routers.reload(new)
        self._config = new

    async def upgrade(self, config: dict[str, Any]) -> None:
        """Gives the cluster another configuration; workers with other settings are replaced while requests run.

        Raises:
            ConfigError: a running cluster cannot take it over, or an upgrade runs already; nothing has changed.
            BatonError: it has failed; the message says why and what the cluster runs now.
        """
        self._refuse_during_upgrade()
        new = BatonConfig.from_dict(config)
        plan = plan_upgrade(self._config, new)
        self._is_upgrading = True
        try:
            if new.model != self._config.model:
                await self._routers.check_model(new)
            await self._upgrade.run(self._config, new, lambda: self._routers.reload(new))
        finally:
            self._is_upgrading = False
        self._config = new
        for name, size in plan.sizes.items():
            self._pools[name].scale(size)

    async def settle(self) -> list[str]:
        """Waits until all workers are ready, at most ``ray.start_timeout_s``; returns what is not, for people."""
        return await settle(self._pools, self._config.ray.start_timeout_s)

    def _refuse_during_upgrade(self) -> None:
        if self._is_upgrading:
            raise ConfigError(
                "An upgrade of this cluster runs already. Try again when it has ended; see `baton status`."
            )

    async def beat(self) -> int:
        """The process id. The answer shows that the event loop runs."""
        return os.getpid()

    async def next_reports(self) -> list[str]:
        """Waits for the next lines of progress."""
        lines = [await self._reports.get()]
        while not self._reports.empty():
            lines.append(self._reports.get_nowait())
        return lines

    async def num_reports(self) -> int:
        """The number of lines of progress so far."""
        return self._num_reports

    async def wait(self) -> None:
        """Waits while the cluster lives; raises ``BatonError`` when it cannot continue."""
        await asyncio.shield(self._failed)

    async def scale(self, targets: dict[str, int | None]) -> dict[str, Any]:
        """Sets the pools' sizes manually, which disables autoscaling for them; ``None`` enables it for a pool again.

        Raises:
            BatonError: a pool is unknown, a size is impossible, or ``None`` was given without an autoscaler.
        """
        for name, target in targets.items():
            self._check_pool(name)
            if target is None:
                if not self._config.autoscaler.enabled:
                    raise InvalidRequestError(
                        f"{name}=auto needs the autoscaler, which is off. Start the cluster with autoscaler.enabled, "
                        "or give a number of workers.",
                        param=name,
                    )
            elif target < 1:
                raise InvalidRequestError(f"A pool needs at least one worker, got {name}={target}.", param=name)
        self._check_room({name: target for name, target in targets.items() if target is not None})
        for name, target in targets.items():
            pool = self._pools[name]
            pool.is_pinned = target is not None and self._config.autoscaler.enabled
            if target is not None:
                pool.scale(target)
        return self.pools()

    def _check_room(self, targets: dict[str, int]) -> None:
        """Refuses more workers than can ever run: a local cluster has no other nodes."""
        num_cpus = self._config.ray.local_cpus
        if num_cpus is None or self._config.simulation.profile is not None:
            return
        now = {name: pool.target for name, pool in self._pools.items()}
        sizes = now | targets
        wanted = sum(size * self._config.pool(name).resources.cpus for name, size in sizes.items())
        if wanted > num_cpus and any(size > now[name] for name, size in targets.items()):
            asked = ", ".join(f"{name}={size}" for name, size in sizes.items())
            raise InvalidRequestError(
                f"{asked} would need {wanted:g} CPUs, but Ray has {num_cpus} on this machine (ray.num_cpus) and no "
                "other nodes. Ask for fewer workers.",
                param=next(iter(targets)),
            )

    async def change_role(self, source: str, destination: str) -> dict[str, Any]:
        """Drains a worker of one pool and moves it to the other pool with its weights.

        Raises:
            BatonError: a pool is unknown, workers cannot change their role, or the pool has no worker to spare.
        """
        self._change_role(source, destination, ChangeOrigin.OPERATOR)
        return self.pools()

    def _change_role(self, source: str, destination: str, by: ChangeOrigin) -> None:
        self._check_pool(source)
        self._check_pool(destination)
        if source == destination:
            raise InvalidRequestError(f"from and to are both {source}; name two different pools.", param="to")
        obstacle = self._role_change_obstacle()
        if obstacle:
            raise InvalidRequestError(f"No worker can change its role: {obstacle}")
        self._pools[destination].change_role_from(self._pools[source], by)

    async def autoscale(self, targets: dict[str, int], role_change: tuple[str, str] | None) -> None:
        """Applies a decision of the autoscaler, except to pools whose size has since been set manually.

        Raises:
            BatonError: as in :meth:`change_role`.
        """
        free = {name: pool for name, pool in self._pools.items() if not pool.is_pinned}
        if role_change is not None and all(name in free for name in role_change):
            self._change_role(*role_change, ChangeOrigin.AUTOSCALER)
        for name, target in targets.items():
            if name in free and free[name].target != target:
                free[name].scale(target)

    async def pool_counts(self) -> tuple[dict[str, PoolCounts], str]:
        """The autoscaler's input: the counts of the pools by name, and the obstacle to role changes, if any."""
        return {name: pool.counts() for name, pool in self._pools.items()}, self._role_change_obstacle()

    def _leave_node(self, node_id: str) -> None:
        for pool in self._pools.values():
            pool.leave_node(node_id)

    def _role_change_obstacle(self) -> str:
        if self._is_upgrading:
            return "an upgrade replaces workers; try again when it has ended."
        if self._nodes.has_reserved_nodes:
            return f"nodes are reserved for the workers of one pool (label {POOL_LABEL}); start new workers instead."
        has_draft = any(info.draft_method for info in self._infos.values() if info.pool == DECODE)
        return self._config.role_change_obstacle(has_draft=has_draft)

    def _check_pool(self, name: str) -> None:
        if name not in self._pools:
            raise NotFoundError(f"There is no pool {name!r}. Known pools: {', '.join(self._pools)}.", param=name)

    def pools(self) -> dict[str, Any]:
        """The state of both pools, JSON-ready."""
        return {name: pool.status() for name, pool in self._pools.items()}

    async def pool_status(self) -> dict[str, Any]:
        """Like :meth:`pools`, for callers in other processes."""
        return self.pools()

    async def figures(self) -> tuple[dict[str, PoolFigures], int]:
        """Figures for metrics: those of the pools by name, and how often the router was replaced."""
        return {name: pool.figures() for name, pool in self._pools.items()}, self._routers.num_restarts

    async def stop(self) -> None:
        """Stops everything, the router first, so that no request loses its workers."""
        for task in (self._router_task, self._watching, self._nodes_task, self._leftovers):
            if task is not None:
                task.cancel()
        await self._routers.stop()
        await asyncio.gather(*(pool.stop() for pool in self._pools.values()))
        await asyncio.gather(*(client.close() for client in self._clients.values()))

    async def worker_ready(self, info: WorkerInfo, *, is_outdated: bool = False) -> None:
        """Adds a ready worker to the router.

        Raises:
            LayoutMismatchError: the worker's KV layout or vocabulary differs from that of the others.
        """
        self._agreement.check(info, is_outdated=is_outdated)
        self._infos[info.worker_id] = info
        client = WorkerClient(info.address, self._config.security.credentials(self._secret))
        self._clients[info.worker_id] = client
        self._watch.add(info.worker_id, client)
        await self._routers.tell("add_worker", info.to_dict())

    def _judged(self, worker_id: str, standing: Standing, reason: str) -> None:
        for pool in self._pools.values():
            pool.judged(worker_id, standing, reason)

    async def worker_gone(self, worker_id: str) -> None:
        self._infos.pop(worker_id, None)
        self._watch.remove(worker_id)
        if (client := self._clients.pop(worker_id, None)) is not None:
            await client.close()
        await self._routers.tell("remove_worker", worker_id)

    async def drain(self, worker_id: str, timeout_s: float) -> None:
        self._infos.pop(worker_id, None)  # a router that restarts now must not use the worker
        await self._routers.tell("drain_worker", worker_id, timeout_s)

    def report(self, text: str) -> None:
        logger.info("%s", text)
        self._num_reports += 1
        self._reports.put_nowait(text)
