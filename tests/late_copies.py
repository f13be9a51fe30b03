"""A device as slow as it may be: what is brought in arrives only when the engine joins it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Mark:
    """``thread``: whose it is."""

    number: int
    thread: str


class LateCopies:
    """Implements :class:`engine.kv_copies.CopyQueue` for a cache that lies in this process's memory all the same.

    Attributes:
        fetched_after, brought_after: the marks behind which they were queued.
        marks: those that were made.
    """

    def __init__(self) -> None:
        self._coming: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self.marks: list[Mark] = []
        self.fetched_after: list[Mark] = []
        self.brought_after: list[Mark] = []

    @property
    def num_coming(self) -> int:
        return len(self._coming)

    def mark(self) -> Mark:
        self.marks.append(Mark(len(self.marks), threading.current_thread().name))
        return self.marks[-1]

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        return torch.full((num_bytes,), 0xA5, dtype=torch.uint8)  # whatever the last one left there

    def fetch(self, copy: Callable[[], None], after: Mark) -> None:
        self.fetched_after.append(after)
        copy()

    def bring(self, copy: Callable[[], None], after: Mark) -> None:
        self.brought_after.append(after)
        with self._lock:
            self._coming.append(copy)

    def join(self) -> None:
        with self._lock:
            coming, self._coming = self._coming, []
        for copy in coming:
            copy()
