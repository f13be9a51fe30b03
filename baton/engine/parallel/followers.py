"""The other ranks of a worker, as seen by rank 0: starting them, talking to them, and noticing when one fails.

A follower is a process of its own that does what rank 0 tells it, see :mod:`baton.engine.parallel.channel`. When one
ends, or gives no sign of life, all are killed: the ranks compute together, and none can continue alone. Exchanges that
rank 0 is waiting for fail then too.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from baton.engine.device.device_errors import DeviceLostError
from baton.engine.parallel.channel import Message, Outbox, make_pair, read_reply
from baton.engine.parallel.group import EXCHANGE_TIMEOUT_S, RankGroup, has_joined, host_store, join_ranks

logger = logging.getLogger(__name__)

_PROCESS = "baton.engine.parallel.follower_process"
_FOLLOW = "baton.engine.runner.follower:follow"
SILENCE_S = 10.0
"""A follower that gives no sign of life for so long is frozen; it gives two a second."""
LOADING_SILENCE_S = 60.0
"""The same while it loads: the import of a large library stops all threads of Python."""
_LOOK_S = 0.2
_BLAME_S = 1.0
_END_S = 5.0


class Followers:
    """The followers of a worker whose rank 0 is this process.

    Args:
        size: number of ranks, this one included.
        silence_s: see :data:`SILENCE_S`.
        loading_silence_s: see :data:`LOADING_SILENCE_S`.

    Attributes:
        failure: why the ranks cannot continue; ``None`` while they can.
        on_failure: called with the error when they cannot, in any thread.
    """

    def __init__(self, size: int, silence_s: float = SILENCE_S, loading_silence_s: float = LOADING_SILENCE_S) -> None:
        self.size = size
        self.failure: str | None = None
        self.on_failure: Callable[[Exception], None] = lambda error: None
        self._silence_s = silence_s
        self._loading_silence_s = loading_silence_s
        pairs = [make_pair() for _ in range(size - 1)]
        self._own = [own for own, _ in pairs]
        self._theirs = [theirs for _, theirs in pairs]
        self._outbox = Outbox(self._own)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._alive = threading.Event()  # all followers gave a sign of life, or one failed
        self._failed = threading.Event()
        self._ending = False
        # Linux ends the followers with the thread that started them, so that thread stays.
        self._watcher = threading.Thread(target=self._watch, name="baton-ranks", daemon=True)

    @property
    def pids(self) -> list[int]:
        """Process ids of the followers."""
        return [process.pid for process in self._processes]

    def start(self, builder: str, argument: object, device: torch.device) -> RankGroup:
        """Starts the followers and joins them.

        Args:
            builder: ``"module:function"``, called in each follower with ``argument``, its group and its device; it
                returns the follower's ``ModelRunner``. This process must do the same work meanwhile.
            argument: anything that pickle knows.
            device: of this rank; that of rank ``r`` is the ``r``-th GPU where this one is a GPU.

        Raises:
            DeviceLostError: a follower ended.
        """
        store = host_store(self.size, EXCHANGE_TIMEOUT_S)
        self._watcher.start()
        self._alive.wait()
        level = logging.getLogger().level
        self.send(("begin", _FOLLOW, level, self.size, store.port, device.type, builder, argument))
        while not has_joined(store, self.size):
            self._check()
            time.sleep(_LOOK_S)
        # In another thread, because nothing else can end the wait for a process that ends just now.
        joining: Future[RankGroup] = Future()
        threading.Thread(target=_run_into, args=(joining, self.size, store, device), daemon=True).start()
        while True:
            try:
                return joining.result(_LOOK_S)
            except TimeoutError:
                self._check()
            except RuntimeError as error:
                raise self.lost(error) from error

    def _check(self) -> None:
        if self.failure is not None:
            raise DeviceLostError(f"the ranks of this worker cannot continue: {self.failure}")

    def send(self, message: Message) -> None:
        """Sends a message to all followers; one thread at a time.

        Raises:
            DeviceLostError: a follower failed.
        """
        try:
            self._outbox.send(message)
        except OSError as error:
            raise self.lost(error) from error

    def ask(self, message: Message) -> list[Any]:
        """Sends a message, and returns the followers' answers. Raises what :meth:`send` does."""
        self.send(message)
        return self._outbox.answers()

    def lost(self, cause: Exception) -> DeviceLostError:
        """The error to raise after ``cause`` interrupted something that all ranks do: they are out of step now."""
        if not self._failed.wait(_BLAME_S):  # the end of another rank shows here first
            self._fail(f"rank 0 could not continue: {type(cause).__name__}: {cause}")
        return DeviceLostError(f"the ranks of this worker cannot continue: {self.failure}")

    def close(self) -> None:
        """Ends the followers."""
        self._ending = True
        for each in self._own:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + _END_S
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._watcher.ident is not None:
            self._watcher.join()

    def _watch(self) -> None:
        try:
            self._spawn()
        except OSError as error:
            self._fail(f"no process could be started: {error}")
        heard = [time.monotonic()] * len(self._own)
        silent = set(range(len(self._own)))
        with selectors.DefaultSelector() as selector:
            for index, each in enumerate(self._own):
                selector.register(each, selectors.EVENT_READ, index)
            while self.failure is None and not self._ending:
                for key, _ in selector.select(_LOOK_S):
                    index = key.data
                    reply = read_reply(self._own[index])
                    if not reply:
                        self._fail(f"rank {index + 1} has ended; see the worker's log")
                        break
                    heard[index] = time.monotonic()
                    silent.discard(index)
                    if not silent:
                        self._alive.set()
                    self._outbox.handle_reply(index, reply)
                last, index = min((each, index) for index, each in enumerate(heard))
                allowed_s = self._silence_s if self._outbox.is_answered else self._loading_silence_s
                if time.monotonic() - last > allowed_s:
                    self._fail(f"rank {index + 1} gave no sign of life for {allowed_s:g} s")

    def _spawn(self) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        for rank, theirs in enumerate(self._theirs, 1):
            command = [sys.executable, "-m", _PROCESS, str(rank), str(theirs.fileno()), str(os.getpid())]
            self._processes.append(
                subprocess.Popen(
                    command,
                    pass_fds=[theirs.fileno()],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,  # an interrupt from the terminal reaches rank 0 only
                )
            )
            theirs.close()

    def _fail(self, reason: str) -> None:
        if self.failure is not None or self._ending:
            return
        self.failure = reason
        self._failed.set()
        logger.error("the ranks of this worker cannot continue: %s", reason)
        for process in self._processes:
            process.kill()
        error = DeviceLostError(f"the ranks of this worker cannot continue: {reason}")
        self._outbox.fail(error)
        self._alive.set()
        self.on_failure(error)


def _run_into(joining: Future[RankGroup], size: int, store: TCPStore, device: torch.device) -> None:
    try:
        joining.set_result(join_ranks(0, size, store, device, EXCHANGE_TIMEOUT_S))
    except Exception as error:  # noqa: BLE001 - the waiting thread raises it
        joining.set_exception(error)
