"""Actor classes that stand in for :class:`cluster.worker.worker_host.WorkerHost`, and a Ray to run them on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

import ray

from baton.core.errors import ConfigError
from baton.process.worker_environment import LOCAL_RAY_VARIABLES
from cluster.config.config import BatonConfig
from cluster.worker.granted_gpus import hide_ungranted_gpus
from tests.worker_infos import make_info

_OBJECT_STORE_BYTES = 80 * 2**20


class ProcessExit(BaseException):
    """Ends the process of an actor that runs within the test's own; see :mod:`tests.fake_ray`."""


class StartsForever(BaseException):
    """Keeps such an actor from ever being there."""


class Process(Protocol):
    """The process of an actor."""

    pid: int

    def device(self) -> str:
        """Where the actor runs, and what Ray granted; see :func:`placement_of`."""
        ...

    def exit(self) -> None: ...

    def start_endlessly(self) -> None: ...

    async def hang(self) -> None:
        """Answers no call any more."""
        ...

    def at_exit(self, work: Callable[[], Awaitable[None]]) -> None:
        """Does what the end of a real process does by itself."""
        ...


class OwnProcess:
    """The process that Ray started for an actor."""

    def __init__(self) -> None:
        self.pid = os.getpid()

    def device(self) -> str:
        context = ray.get_runtime_context()
        granted = ",".join(sorted(context.get_accelerator_ids().get("GPU", [])))
        return "|".join((context.get_node_id(), granted, os.environ.get("CUDA_VISIBLE_DEVICES", "unset")))

    def exit(self) -> None:
        os._exit(1)

    def start_endlessly(self) -> None:
        threading.Event().wait()

    async def hang(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def at_exit(self, work: Callable[[], Awaitable[None]]) -> None:
        pass


PROCESS: ContextVar[Process] = ContextVar("process", default=OwnProcess())  # noqa: B039 - this process has only one


class FakeHost:
    """Is ready at once. Imports little, because each one's process imports it anew."""

    def __init__(
        self,
        worker_id: str,
        pool: str,
        role_path: str,
        config: dict[str, Any],
        bind_host: str | None,
        secret: bytes,
        variables: dict[str, str],
    ) -> None:
        self.config = BatonConfig.from_dict(config)
        self.worker_id = worker_id
        self.pool = pool
        self.secret = secret
        self.credentials = self.config.security.credentials(secret)
        self._stopped = asyncio.Event()

    async def start(self) -> dict[str, Any]:
        process = PROCESS.get()
        return make_info(self.worker_id, self.pool, pid=process.pid, device=process.device()).to_dict()

    async def describe(self) -> dict[str, Any]:
        return {"config": self.config.to_dict(), "secret": self.secret, "info": await self.start()}

    async def wait(self) -> None:
        await self._stopped.wait()

    async def stop(self) -> None:
        self._stopped.set()

    async def next_progress(self) -> str:
        await asyncio.Event().wait()  # there is no progress to report
        return ""

    async def change_role(self, worker_id: str, pool: str, role_path: str) -> dict[str, Any]:
        over, self._stopped = self._stopped, asyncio.Event()
        over.set()
        self.worker_id, self.pool = worker_id, pool
        return await self.start()


class PlacedHost(FakeHost):
    """Sees the GPUs that a worker of the same resources would see."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        hide_ungranted_gpus()


class ServingHost(FakeHost):
    """Has a gRPC server that behaves like a worker's."""

    _address = ""

    async def start(self) -> dict[str, Any]:
        from tests.fake_workers import FakeWorker  # takes 0.4 s, which other hosts need not spend

        process = PROCESS.get()
        if not self._address:
            self._worker = FakeWorker(self.worker_id, self.pool, credentials=self.credentials)
            self._address = (await self._worker.start()).address
            process.at_exit(self._worker.die)
        return make_info(self.worker_id, self.pool, self._address, pid=process.pid).to_dict()


class UnchangingHost(FakeHost):
    """Cannot change its role."""

    async def change_role(self, worker_id: str, pool: str, role_path: str) -> dict[str, Any]:
        raise ConfigError("there is no such role here.")


class HangingHost(FakeHost):
    """Never finishes loading its model. Creates a file in the folder ``served_model_name``, if that is set."""

    async def start(self) -> dict[str, Any]:
        for folder in self.config.served_model_names:
            (Path(folder) / self.worker_id).touch()
        await asyncio.Event().wait()
        return {}


class SilentHost(FakeHost):
    """The process of the first one stops while it loads its model."""

    async def start(self) -> dict[str, Any]:
        if self.worker_id.endswith("-1"):
            await PROCESS.get().hang()
        return await super().start()


class MisconfiguredHost(FakeHost):
    async def start(self) -> dict[str, Any]:
        raise ConfigError("max_model_len is 99, but the model's context length is 9.")


class CrashingHost(FakeHost):
    async def start(self) -> dict[str, Any]:
        raise ValueError("no luck today")


class DyingHost(FakeHost):
    """Exits during its start."""

    async def start(self) -> dict[str, Any]:
        PROCESS.get().exit()
        return {}


class FlakyHost(FakeHost):
    """Fails to start as the first worker, and starts as any other."""

    async def start(self) -> dict[str, Any]:
        if self.worker_id.endswith("-1"):
            raise ValueError("only this once")
        return await super().start()


class OtherLayoutHost(FakeHost):
    """Has different KV layouts on prefill and decode workers."""

    async def start(self) -> dict[str, Any]:
        return await super().start() | {"kv_fingerprint": self.pool}


def placement_of(device: str) -> tuple[str, list[str], str]:
    """(node id, granted GPU ids, CUDA_VISIBLE_DEVICES) of a :class:`FakeHost`."""
    node_id, granted, visible = device.split("|")
    return node_id, granted.split(",") if granted else [], visible


def local_ray_variables() -> contextlib.AbstractContextManager[object]:
    """Sets baton's variables of a local Ray: nodes start no spare workers, and workers have normal priority."""
    return mock.patch.dict(os.environ, LOCAL_RAY_VARIABLES)


@contextlib.contextmanager
def small_ray(**options: Any) -> Iterator[None]:
    """A separate Ray cluster on the loopback interface."""
    with local_ray_variables():
        ray.init(
            address="local",
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
            object_store_memory=_OBJECT_STORE_BYTES,
            _node_ip_address="127.0.0.1",
            **options,
        )
    try:
        yield
    finally:
        ray.shutdown()
