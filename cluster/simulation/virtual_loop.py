"""An event loop in virtual time: when nothing is ready, its clock jumps to the next timer."""

from __future__ import annotations

import asyncio
import contextvars
import selectors
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Executor
from typing import Any, TypeVar

from baton.core.errors import InternalError

T = TypeVar("T")


class VirtualDeadlockError(InternalError):
    """All tasks wait, and no timer is set to wake one."""

    code = "virtual_deadlock"


class VirtualEventLoop(asyncio.SelectorEventLoop):
    """Runs coroutines in virtual time, without sleeping. ``time()`` is seconds since the loop was created.

    Work in threads takes no virtual time: the clock stands still until it is done. Sockets are not supported, since
    communication with the outside needs real time.
    """

    def __init__(self) -> None:
        self._now_s = 0.0
        self._num_in_threads = 0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        """Virtual seconds."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Moves the clock. Only the selector may call it."""
        self._now_s += seconds

    @property
    def waits_for_threads(self) -> bool:
        return self._num_in_threads > 0

    def run_in_executor(  # type: ignore[override]  # the base class has overloads for its own type variables
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        future = super().run_in_executor(executor, func, *args)
        self._num_in_threads += 1
        future.add_done_callback(self._thread_done, context=contextvars.Context())
        return future

    async def shutdown_default_executor(self) -> None:
        self._num_in_threads += 1
        try:
            await super().shutdown_default_executor()
        finally:
            self._num_in_threads -= 1

    def _thread_done(self, _: asyncio.Future[Any]) -> None:
        self._num_in_threads -= 1


class _JumpingSelector(selectors.BaseSelector):
    """Advances the clock by the timeout instead of waiting."""

    def __init__(self, loop: VirtualEventLoop) -> None:
        self._real = selectors.DefaultSelector()
        self._loop = loop

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._real.get_map()

    def close(self) -> None:
        self._real.close()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self._loop.waits_for_threads:
            return self._real.select(timeout if timeout == 0 else None)
        if timeout is None:
            raise VirtualDeadlockError(
                f"At {self._loop.time():.3f} s of virtual time, all tasks wait and no timer is set, so the "
                "simulation cannot continue."
            )
        if timeout > 0:
            self._loop.advance(timeout)
        return []


def run_virtually(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Runs ``main()`` to its end on a new :class:`VirtualEventLoop`.

    Raises:
        VirtualDeadlockError: all tasks wait and no timer is set.
    """
    with asyncio.Runner(loop_factory=VirtualEventLoop) as runner:
        return runner.run(main())
