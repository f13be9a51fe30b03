"""A copy queue of the slowest possible device: imported KV arrives only when the engine joins it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Mark:
    """A mark in the queue.

    Attributes:
        thread: name of the thread that made the mark.
        step: number of steps computed before, by :attr:`LateCopies.num_steps`.
    """

    number: int
    thread: str
    step: int


class LateCopies:
    """Implements ``CopyQueue`` for a cache in this process's memory.

    Attributes:
        num_steps: number of steps, which a test may count, to know at which step a mark was made.
        fetched_after, brought_after: the marks after which copies were queued.
        marks: the marks that were made.
        max_behind: number of pending copies from which callers must wait.
        num_waits: number of waits.
    """

    def __init__(self, max_behind: int = 1_000_000) -> None:
        self._coming: list[tuple[Mark, Callable[[], None]]] = []
        self._lock = threading.Lock()
        self._number = 0
        self.max_behind = max_behind
        self.num_steps = self.num_waits = 0
        self.marks: list[Mark] = []
        self.fetched_after: list[Mark] = []
        self.brought_after: list[Mark] = []

    @property
    def num_coming(self) -> int:
        return len(self._coming)

    def _new_mark(self) -> Mark:
        self._number += 1
        return Mark(self._number, threading.current_thread().name, self.num_steps)

    def mark(self) -> Mark:
        self.marks.append(self._new_mark())
        return self.marks[-1]

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        return torch.full((num_bytes,), 0xA5, dtype=torch.uint8)  # as if left by the last owner

    def fetch(self, copy: Callable[[], None], after: Mark) -> None:
        self.fetched_after.append(after)
        copy()

    def bring(self, copy: Callable[[], None], after: Mark, num_bytes: int) -> Mark:
        self.brought_after.append(after)
        with self._lock:
            self._coming.append((self._new_mark(), copy))
            return self._coming[-1][0]

    def join(self, brought: Mark) -> None:
        self._arrive(brought)

    def backlog(self) -> Mark | None:
        with self._lock:
            behind = len(self._coming) - self.max_behind
            return self._coming[behind - 1][0] if behind > 0 else None

    def wait(self, mark: Mark) -> None:
        assert threading.current_thread() is not threading.main_thread(), "the event loop must not wait"
        self.num_waits += 1
        self._arrive(mark)

    def _arrive(self, mark: Mark) -> None:
        """Executes the copies that were queued up to the mark."""
        with self._lock:
            coming = [copy for number, copy in self._coming if number.number <= mark.number]
            self._coming = self._coming[len(coming) :]
        for copy in coming:
            copy()
