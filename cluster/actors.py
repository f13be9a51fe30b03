"""The actors that Ray starts. Importing this module loads neither torch nor the web framework."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from baton.process.garbage import imports_that_stay
from baton.process.without_torch import do_without_torch
from baton.process.worker_environment import adopt_variables

if TYPE_CHECKING:
    from cluster.router_process.router_peers import Question
    from cluster.worker.worker_host import WorkerHost


class RouterActor:
    """Delegates to a :class:`cluster.router_process.router_host.RouterHost`, in a process that never loads torch.

    Args:
        variables: see :func:`baton.process.worker_environment.carried_variables`.
    """

    def __init__(
        self,
        config: dict[str, Any],
        port: int,
        controller: Any,
        secret: bytes,
        variables: Mapping[str, str] | None = None,
        index: int = 0,
    ) -> None:
        adopt_variables(variables or {})
        do_without_torch()
        with imports_that_stay():
            from cluster.router_process.router_host import RouterHost

        self._host = RouterHost(config, port, controller, secret, index)

    async def start(self) -> tuple[str, int]:
        return await self._host.start()

    async def describe(self) -> dict[str, Any]:
        return await self._host.describe()

    async def beat(self) -> int:
        return await self._host.beat()

    async def meet(self, routers: dict[int, Any]) -> None:
        await self._host.meet(routers)

    async def answer(self, question: Question, *arguments: Any) -> Any:
        return await self._host.answer(question, *arguments)

    async def follow(self, controller: Any, workers: list[dict[str, Any]]) -> None:
        await self._host.follow(controller, workers)

    async def add_worker(self, info: dict[str, Any]) -> None:
        await self._host.add_worker(info)

    async def drain_worker(self, worker_id: str, timeout_s: float) -> None:
        await self._host.drain_worker(worker_id, timeout_s)

    async def remove_worker(self, worker_id: str) -> None:
        await self._host.remove_worker(worker_id)

    async def reload(self, config: dict[str, Any]) -> None:
        self._host.reload(config)

    async def check_model(self, config: dict[str, Any]) -> None:
        await self._host.check_model(config)

    async def wait(self) -> None:
        await self._host.wait()

    async def stop(self) -> None:
        await self._host.stop()


class WorkerActor:
    """Delegates to a :class:`cluster.worker.worker_host.WorkerHost`, which takes seconds to import.

    The first call imports it, so that the controller soon knows that the process has begun and when it falls silent.

    Args:
        variables: as for :class:`RouterActor`.
    """

    def __init__(
        self,
        worker_id: str,
        pool: str,
        role_path: str,
        config: dict[str, Any],
        bind_host: str | None,
        secret: bytes,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        adopt_variables(variables or {})
        self._arguments = (worker_id, pool, role_path, config, bind_host, secret)

    @cached_property
    def _host(self) -> WorkerHost:
        with imports_that_stay():
            from cluster.worker.worker_host import WorkerHost

        return WorkerHost(*self._arguments)

    async def start(self) -> dict[str, Any]:
        return await self._host.start()

    async def describe(self) -> dict[str, Any]:
        return await self._host.describe()

    async def next_progress(self) -> str | None:
        return await self._host.next_progress()

    async def change_role(self, worker_id: str, pool: str, role_path: str) -> dict[str, Any]:
        return await self._host.change_role(worker_id, pool, role_path)

    async def wait(self) -> None:
        await self._host.wait()

    async def stop(self) -> None:
        await self._host.stop()
