"""A Ray within this process, for tests of what the controller and its pools do with actors.

An actor is an object, and a call of it is a task on the test's event loop. Errors, deaths and placement look as they do
with a real Ray, which takes a second of CPU for every actor. :class:`RealRay` has the same methods for tests to use.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import traceback
from collections.abc import Awaitable, Callable, Generator
from contextvars import ContextVar
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, RayError, RayTaskError

from tests.fake_hosts import PROCESS, ProcessExit, StartsForever

_MODULES = ("places", "pool_member", "router_group", "shared_processes")
_NODE_ID = "0" * 56
_CURRENT: ContextVar[FakeActor] = ContextVar("current actor")


class RealRay:
    """What tests do with the Ray that runs on this machine."""

    remote = staticmethod(ray.remote)
    kill = staticmethod(ray.kill)

    def kill_process(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)

    def runs(self, pid: int) -> bool:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        return True

    def free_cpus(self) -> float:
        return ray.available_resources().get("CPU", 0.0)


class FakeRay:
    """Stands in for the module ``ray``, with one node."""

    exceptions = ray.exceptions

    def __init__(self, num_cpus: int) -> None:
        self._num_cpus = num_cpus
        self._actors: list[FakeActor] = []
        self.exits: list[asyncio.Future[None]] = []
        self._pids = itertools.count(2**22 + 1)  # larger than those of Linux

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in _MODULES:
            monkeypatch.setattr(f"cluster.controller.{module}.ray", self)

    # What the controller calls.

    def remote(self, actor_class: type) -> _ActorClass:
        return _ActorClass(self, actor_class)

    def kill(self, actor: FakeActor, *, no_restart: bool = True) -> None:
        actor.die(ActorDiedError())

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeManagerAddress": "127.0.0.1", "Resources": {"CPU": float(self._num_cpus)}, "Alive": True}]

    def available_resources(self) -> dict[str, float]:
        return {"CPU": self.free_cpus()}

    def get_runtime_context(self) -> FakeRay:
        return self

    def get_node_id(self) -> str:
        return _NODE_ID

    @property
    def current_actor(self) -> FakeActor:
        return _CURRENT.get()

    # What tests call.

    async def close(self) -> None:
        """Waits until nothing is left of what actors have asked to be cleaned up, also if they live."""
        for actor in self._actors:
            actor.clean_up()
        await asyncio.gather(*self.exits)

    def kill_process(self, pid: int) -> None:
        [killed] = [actor for actor in self._actors if actor.pid == pid]
        killed.die(ActorDiedError())

    def actors(self, actor_class: type) -> list[FakeActor]:
        """The handles of the live actors of a class."""
        return [actor for actor in self._actors if actor.is_alive and actor.is_a(actor_class)]

    def instances(self, actor_class: type) -> list[Any]:
        """The objects of these actors."""
        return [actor.instance for actor in self.actors(actor_class)]

    def runs(self, pid: int) -> bool:
        return any(actor.pid == pid and actor.is_alive for actor in self._actors)

    def free_cpus(self) -> float:
        return self._num_cpus - sum(actor.num_cpus for actor in self._actors if actor.is_placed and actor.is_alive)

    def add_cpus(self, num_cpus: int) -> None:
        """Gives the node more CPUs, as if another node had come."""
        self._num_cpus += num_cpus
        self.place_waiting()

    def start(self, actor: FakeActor) -> None:
        self._actors.append(actor)
        self.place_waiting()

    def place_waiting(self) -> None:
        for actor in self._actors:
            if actor.is_alive and not actor.is_placed and actor.num_cpus <= self.free_cpus():
                actor.place(next(self._pids))


class _ActorClass:
    """An actor class with its options."""

    def __init__(self, fake_ray: FakeRay, actor_class: type, **options: Any) -> None:
        self._ray = fake_ray
        self._class = actor_class
        self._options = options

    def options(self, **options: Any) -> _ActorClass:
        return _ActorClass(self._ray, self._class, **self._options, **options)

    def remote(self, *arguments: Any) -> FakeActor:
        actor = FakeActor(self._ray, self._class, arguments, self._options.get("num_cpus", 1))
        self._ray.start(actor)
        return actor


class FakeActor:
    """A handle of an actor; also the actor's process, which its object finds in :data:`tests.fake_hosts.PROCESS`."""

    def __init__(self, fake_ray: FakeRay, actor_class: type, arguments: tuple[Any, ...], num_cpus: float) -> None:
        self.num_cpus = num_cpus
        self.pid = 0
        self._ray = fake_ray
        self._class = actor_class
        self._arguments = arguments
        self._created: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._death: asyncio.Future[RayError] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._hangs = False
        self._at_exit: list[Callable[[], Awaitable[None]]] = []

    def __getattr__(self, name: str) -> _Method:
        return _Method(self, name)

    @property
    def is_placed(self) -> bool:
        return self.pid != 0

    @property
    def instance(self) -> Any:
        return self._created.result()

    @property
    def is_alive(self) -> bool:
        return not self._death.done()

    @property
    def num_open_calls(self) -> int:
        """Calls that have not ended, even if their callers have."""
        return len(self._tasks)

    def is_a(self, actor_class: type) -> bool:
        return issubclass(self._class, actor_class)

    def place(self, pid: int) -> None:
        self.pid = pid
        self._spawn(self._create())

    def die(self, error: RayError) -> None:
        if self.is_alive:
            self._death.set_result(error)
            for task in self._tasks:
                task.cancel()
            self.clean_up()
            self._ray.place_waiting()

    def clean_up(self) -> None:
        while self._at_exit:
            self._ray.exits.append(asyncio.ensure_future(self._at_exit.pop()()))

    def device(self) -> str:
        return "cpu"

    def exit(self) -> None:
        raise ProcessExit

    def start_endlessly(self) -> None:
        raise StartsForever

    async def hang(self) -> None:
        self._hangs = True
        await asyncio.Event().wait()

    def at_exit(self, work: Callable[[], Awaitable[None]]) -> None:
        self._at_exit.append(work)

    async def _create(self) -> None:
        self._enter()
        try:
            self._created.set_result(self._class(*self._arguments))
        except StartsForever:
            pass
        except Exception as error:  # noqa: BLE001 - an actor may raise anything
            self.die(ActorDiedError(_task_error("__init__", error)))

    def submit(self, method: str, arguments: tuple[Any, ...]) -> Awaitable[Any]:
        return _Reference(asyncio.create_task(self._call(method, arguments)))

    async def _call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        work = self._spawn(self._work(method, arguments))
        await asyncio.wait({work, self._death}, return_when=asyncio.FIRST_COMPLETED)
        if self._death.done():
            raise self._death.result()
        return work.result()

    async def _work(self, method: str, arguments: tuple[Any, ...]) -> Any:
        self._enter()
        instance = await asyncio.shield(self._created)
        if self._hangs:
            await asyncio.Event().wait()
        if method == "__ray_ready__":
            return None
        try:
            result = getattr(instance, method)(*arguments)
            return await result if isinstance(result, Awaitable) else result
        except ProcessExit:
            self.die(ActorDiedError())
        except Exception as error:  # noqa: BLE001 - an actor may raise anything
            raise _task_error(method, error).as_instanceof_cause() from None

    def _enter(self) -> None:
        PROCESS.set(self)
        _CURRENT.set(self)

    def _spawn(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class _Method:
    def __init__(self, actor: FakeActor, name: str) -> None:
        self._actor = actor
        self._name = name

    def remote(self, *arguments: Any) -> Awaitable[Any]:
        return self._actor.submit(self._name, arguments)


class _Reference:
    """The result of a call. A caller that gives up does not end the call."""

    def __init__(self, call: asyncio.Task[Any]) -> None:
        self._call = call
        call.add_done_callback(lambda done: done.cancelled() or done.exception())

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.shield(self._call).__await__()


def _task_error(method: str, error: Exception) -> RayTaskError:
    return RayTaskError(method, "".join(traceback.format_exception(error)), error)
