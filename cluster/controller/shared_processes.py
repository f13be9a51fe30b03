"""Processes that host several workers each. Simulated workers use them, since they need no CPU of their own.

A pool calls a worker's actor; here it gets a proxy that forwards the calls to the process, with the worker's name.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
from typing import Any

import ray
from ray.exceptions import RayError

from baton.core.errors import InternalError
from baton.process.worker_environment import carried_variables
from cluster.config.config import BatonConfig
from cluster.controller.ray_errors import logged

logger = logging.getLogger(__name__)

SIMULATED_PROCESS = "cluster.simulation.host:SimulatedWorkerProcess"
_MAX_CONCURRENT_CALLS = 4
"""Per worker: ``start``, ``wait`` and ``stop`` overlap."""
_STOP_TIMEOUT_S = 5.0
"""A process that does not stop a worker in this time hangs with all of its workers."""


class SharedProcesses:
    """Starts a process when all others are full, and ends a process with its last worker.

    Args:
        process_path: ``"module:Class"`` of the actor.
        per_process: maximum number of workers in a process.
        secret: the cluster's secret.
    """

    def __init__(self, config: BatonConfig, process_path: str, per_process: int, secret: bytes) -> None:
        self._config = config
        self._path = process_path
        self._per_process = per_process
        self._secret = secret
        self._workers: dict[Any, set[str]] = {}
        self._actor_class: Any = None
        self._num_started = 0

    def place(self, worker_id: str, pool: str, bind_host: str | None) -> SharedActor:
        """Assigns a worker to a process, and starts a new process if necessary."""
        with_room = (process for process, names in self._workers.items() if len(names) < self._per_process)
        process = next(with_room, None) or self._create()
        self._workers[process].add(worker_id)
        return SharedActor(self, process, worker_id, pool, bind_host)

    def _create(self) -> Any:
        self._num_started += 1
        if self._actor_class is None:  # once, because Ray stores the code for every actor class that is created
            self._actor_class = ray.remote(_import(self._path)).options(
                num_cpus=0, max_concurrency=_MAX_CONCURRENT_CALLS * self._per_process
            )
        name = f"workers-{self._num_started}"
        process = self._actor_class.remote(self._config.to_dict(), name, self._secret, carried_variables())
        self._workers[process] = set()
        return process

    def leave(self, process: Any, worker_id: str) -> None:
        """Removes a worker from its process, and ends the process after its last worker."""
        names = self._workers.get(process)
        if names is None:
            return
        names.discard(worker_id)
        if not names:
            self.end(process)

    def end(self, process: Any) -> None:
        """Ends a process, with all of its workers."""
        self._workers.pop(process, None)
        ray.kill(process, no_restart=True)

    def broken(self, process: Any) -> None:
        """Stops assigning workers to a process that has failed."""
        self._workers.pop(process, None)


def simulated_processes(config: BatonConfig, secret: bytes) -> SharedProcesses | None:
    """The processes of simulated workers; ``None`` when the configured workers are real."""
    simulation = config.simulation
    if simulation.profile is None:
        return None
    return SharedProcesses(config, SIMULATED_PROCESS, simulation.workers_per_process, secret)


class SharedActor:
    """A worker's proxy in place of the actor handle that a pool expects."""

    def __init__(
        self, processes: SharedProcesses, process: Any, worker_id: str, pool: str, bind_host: str | None
    ) -> None:
        self._processes = processes
        self._process = process
        self._worker_id = worker_id
        self.__ray_ready__ = _Call(process.__ray_ready__)
        self.start = _Call(process.start, worker_id, pool, bind_host)

    def __getattr__(self, name: str) -> _Call:
        return _Call(getattr(self._process, name), self._worker_id)

    async def release(self, *, is_pending: bool) -> None:
        """Takes the worker out of its process. A process that hangs is ended, but not one whose worker hangs alone.

        Args:
            is_pending: whether the process does not run yet. It does not know the worker then, and a call would take as
                long as the start.
        """
        try:
            if not is_pending:
                async with asyncio.timeout(_STOP_TIMEOUT_S):
                    await self._process.stop.remote(self._worker_id)
        except TimeoutError:
            logger.warning("a worker process hangs and is ended", extra={"worker": self._worker_id})
            self._processes.end(self._process)
        except RayError as error:
            logger.info("a worker process was lost: %s", logged(error), extra={"worker": self._worker_id})
            self._processes.broken(self._process)
        self._processes.leave(self._process, self._worker_id)


class _Call:
    """A remote method with its first arguments bound."""

    def __init__(self, method: Any, *arguments: Any) -> None:
        self._method = method
        self._arguments = arguments

    def remote(self, *arguments: Any) -> Any:
        return self._method.remote(*self._arguments, *arguments)


def _import(path: str) -> type:
    module_name, _, class_name = path.partition(":")
    try:
        found: type = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise InternalError(f"{path!r} cannot be imported: {error}") from error
    return found
