"""Work that would delay all other requests on the event loop runs in a few threads, the smallest first.

The threads have the event loop's priority: one that held Python's lock while it waited for a core would stop the loop.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


class WorkThreads:
    """Few threads, and a queue before them.

    Args:
        num_threads: limit of the calls at the same time; further ones wait, and the smallest is the next.
    """

    def __init__(self, num_threads: int = 2) -> None:
        self._pool = ThreadPoolExecutor(num_threads, "gateway-work")
        self._num_free = num_threads
        self._order = itertools.count()
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []

    async def run(self, size: int, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Calls ``function`` in a thread. ``size`` estimates its work, in any unit that all callers share."""
        if self._num_free:
            self._num_free -= 1
        else:
            turn = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (size, next(self._order), turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._pass_on()
                raise
        call = asyncio.get_running_loop().run_in_executor(self._pool, lambda: function(*args, **kwargs))
        call.add_done_callback(lambda _: self._pass_on())  # a call goes on when its caller is cancelled
        return await asyncio.shield(call)

    def _pass_on(self) -> None:
        while self._waiting:
            *_, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return
        self._num_free += 1
