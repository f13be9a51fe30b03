"""Bounds on the work and memory of requests that begin at once: :class:`Turns` and :class:`ByteBudget`."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

_T = TypeVar("_T")
_R = TypeVar("_R")
_PER_PASS = 8
"""Requests that begin in one pass of the event loop. Each costs it one or two milliseconds."""


async def in_passes(function: Callable[[_T], _R], items: Iterable[_T], per_pass: int = _PER_PASS) -> list[_R]:
    """``list(map(function, items))``, with other work of the event loop after every few items."""
    found: list[_R] = []
    for item in items:
        if found and len(found) % per_pass == 0:
            await asyncio.sleep(0)
        found.append(function(item))
    return found


class ByteBudget:
    """A bound on the bytes that several holders keep in memory together."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._num_held = 0

    def take(self, num_bytes: int) -> bool:
        """Reserves bytes and returns True, or returns False if the bound would be exceeded."""
        if self._num_held + num_bytes > self.max_bytes:
            return False
        self._num_held += num_bytes
        return True

    def give_back(self, num_bytes: int) -> None:
        self._num_held -= num_bytes

    @contextmanager
    def share(self) -> Iterator[Share]:
        """A share of the budget that grows, and is given back at the end of the context."""
        share = Share(self)
        try:
            yield share
        finally:
            share.release()


class Share:
    """What one holder has reserved of a :class:`ByteBudget`."""

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self._num_bytes = 0

    def grow(self, num_bytes: int) -> bool:
        """Like :meth:`ByteBudget.take`."""
        taken = self._budget.take(num_bytes)
        self._num_bytes += num_bytes if taken else 0
        return taken

    def release(self) -> None:
        """Gives everything back."""
        self._budget.give_back(self._num_bytes)
        self._num_bytes = 0


class Turns:
    """Lets a few requests begin in each pass of the event loop, in order of arrival.

    A burst of requests would otherwise be one pass of many seconds, in which no token of a running stream and no
    answer to ``/health`` is sent.
    """

    def __init__(self, per_pass: int = _PER_PASS) -> None:
        self._per_pass = per_pass
        self._num_left = per_pass
        self._waiting: deque[Callable[[], None]] = deque()

    def take(self, begin: Callable[[], None]) -> None:
        """Calls ``begin``: now if there is room in this pass and none waits, otherwise in a later pass."""
        if not self._num_left or self._waiting:
            self._waiting.append(begin)
            return
        self._use_one()
        begin()

    async def wait(self) -> None:
        """Returns when it is the caller's turn."""
        turn = asyncio.get_running_loop().create_future()
        self.take(lambda: None if turn.done() else turn.set_result(None))
        await turn

    def _use_one(self) -> None:
        if self._num_left == self._per_pass:
            asyncio.get_running_loop().call_soon(self._next_pass)
        self._num_left -= 1

    def _next_pass(self) -> None:
        self._num_left = self._per_pass
        while self._waiting and self._num_left:
            self._use_one()
            self._waiting.popleft()()
