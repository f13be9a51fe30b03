"""Where prompts wait for company: they leave together, when the time of the first one is over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class HoldingRoom(Generic[T]):
    """
    Args:
        leave: gets each of them, in order.
    """

    def __init__(self, leave: Callable[[T], None]) -> None:
        self._leave = leave
        self._held: list[T] = []
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[T]:
        return iter(self._held)

    def add(self, item: T, hold_s: float) -> None:
        """Whoever joins others leaves with them."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(hold_s, self.open)
        self._held.append(item)

    def remove(self, item: T) -> None:
        if item in self._held:
            self._held.remove(item)

    def open(self) -> None:
        """All leave now."""
        for item in self.clear():
            self._leave(item)

    def clear(self) -> list[T]:
        """Those that were here; they are told nothing."""
        if self._timer is not None:
            self._timer.cancel()
        held, self._held, self._timer = self._held, [], None
        return held
