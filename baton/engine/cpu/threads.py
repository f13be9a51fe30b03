"""Threads that compute a forward together. Helpers sleep in compiled code between forwards and never need the GIL."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.core.errors import NotFusableError
from baton.engine.cpu.tables import Pool

Serve = Callable[[int, int], None]
_LINE_BYTES = 64


class ThreadPool:
    """The calling thread and its helpers.

    Args:
        serve: compiled code that leads a forward (thread 0) or helps with all forwards.
        model: address of the model's table.
        step: address of the step's table.
        max_threads: limit for the threads of a forward.

    Raises:
        NotFusableError: the platform has no semaphores.
    """

    def __init__(self, serve: Serve, model: int, step: int, max_threads: int) -> None:
        self._serve = serve
        self._table = _aligned(Pool.SEMAPHORES + Pool.LINE * max_threads)
        self._table[Pool.MODEL], self._table[Pool.STEP] = model, step
        libc: Any = ctypes.CDLL(None)
        for helper in range(max_threads - 1):
            if libc.sem_init(_semaphore(self._table, helper), 0, 0):
                raise NotFusableError("this platform has no unnamed semaphores")
        self._libc = libc
        self._niceness = os.getpriority(os.PRIO_PROCESS, 0)
        self._helpers: list[threading.Thread] = []
        # Runs even without close(), since helpers must not outlive the memory that they use.
        self._finalizer = weakref.finalize(self, _stop, libc, self._table, self._helpers)

    def run(self, num_threads: int) -> None:
        """Computes one forward; starts helpers when they are first needed, with the caller's niceness.

        A thread inherits the niceness of the thread that starts it, so helpers of another niceness are replaced:
        otherwise a caller would wait for helpers that yield more than it does, or yield in vain.
        """
        niceness = os.getpriority(os.PRIO_PROCESS, 0)
        if niceness != self._niceness:
            _stop(self._libc, self._table, self._helpers)
            self._table[Pool.STOPPED], self._niceness = 0, niceness
        while len(self._helpers) < num_threads - 1:
            self._start_helper()
        self._table[Pool.NUM_THREADS] = num_threads
        self._serve(self._table.ctypes.data, 0)

    def close(self) -> None:
        """Ends the helpers."""
        self._finalizer()

    def _start_helper(self) -> None:
        number = len(self._helpers) + 1
        # A daemon, since it sleeps outside Python and must not keep the process alive.
        helper = threading.Thread(
            target=_help, args=(self._serve, self._table, number), name=f"fused-{number}", daemon=True
        )
        helper.start()
        self._helpers.append(helper)


def _help(serve: Serve, table: npt.NDArray[np.int64], number: int) -> None:
    """Serves until the pool is stopped, and keeps the pool's table alive until then."""
    serve(table.ctypes.data, number)


def _stop(libc: Any, table: npt.NDArray[np.int64], helpers: list[threading.Thread]) -> None:
    table[Pool.STOPPED] = 1
    for index in range(len(helpers)):
        libc.sem_post(_semaphore(table, index))
    for helper in helpers:
        helper.join()
    helpers.clear()


def _semaphore(table: npt.NDArray[np.int64], index: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(table.ctypes.data + 8 * (Pool.SEMAPHORES + Pool.LINE * index))


def _aligned(size: int) -> npt.NDArray[np.int64]:
    """Zeros that begin on a cache line."""
    memory = np.zeros(size + _LINE_BYTES // 8, dtype=np.int64)
    skipped = -memory.ctypes.data % _LINE_BYTES // 8
    return memory[skipped : skipped + size]
