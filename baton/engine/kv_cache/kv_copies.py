"""Copies between a device's KV cache and the host, on streams other than the engine's.

    engine's stream   step 1 ─ mark ─ step 2 ──────────── join ─ step 3
    outgoing                     └─ gather ─ to the host
    incoming                     └─ from the host ─ scatter ┘

Copies do not wait for work that the engine queued after the mark, and a step waits only for what was joined before it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias

import torch

WorkMark: TypeAlias = Any
"""A point in a stream: on CUDA, a ``torch.cuda.Event``."""
MAX_BEHIND_BYTES = 16 * 2**20
"""Limit for incoming bytes in flight. Each part takes pinned memory and some dozens of launches, and after about a
thousand pending launches the driver blocks the launching thread, even the engine's."""


class CopyQueue(Protocol):
    """Copies between the host and a cache that is not in the host's memory."""

    def mark(self) -> WorkMark:
        """Marks what the engine has queued so far; call it in the engine's thread."""
        ...

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        """Returns pinned memory, uint8 ``[num_bytes]``, which the device reads and writes directly."""
        ...

    def fetch(self, copy: Callable[[], None], after: WorkMark) -> None:
        """Runs ``copy``, which queues copies to the host, after ``after``; returns when they are done. Any thread."""
        ...

    def bring(self, copy: Callable[[], None], after: WorkMark, num_bytes: int) -> WorkMark:
        """Runs ``copy``, which queues copies from :meth:`host_memory`, after ``after``; does not wait for them.

        Raises:
            Exception: the error of ``copy``. None of its copies is in flight then.
        """
        ...

    def join(self, brought: WorkMark) -> None:
        """Orders what the engine queues next after ``brought``; call it in the engine's thread."""
        ...

    def backlog(self) -> WorkMark | None:
        """The mark to :meth:`wait` for before more is brought, or ``None``."""
        ...

    def wait(self, mark: WorkMark) -> None:
        """Returns when the device has reached ``mark``."""
        ...


class CudaCopyQueue:
    """Copies on two streams of its own, so that neither direction waits for the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._outgoing, self._incoming = torch.cuda.Stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._behind: deque[tuple[WorkMark, int]] = deque()  # copies that may be in flight, oldest first
        self._lock = threading.Lock()

    def mark(self) -> WorkMark:
        return _record(torch.cuda.current_stream(self._device))

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        # Torch reuses pinned memory, but not while a queued copy still reads it.
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def fetch(self, copy: Callable[[], None], after: WorkMark) -> None:
        self.wait(after)  # here, not in the stream, where the parts of other transfers would wait too
        with torch.cuda.stream(self._outgoing):
            copy()
            done = _record(self._outgoing)
        self.wait(done)

    def bring(self, copy: Callable[[], None], after: WorkMark, num_bytes: int) -> WorkMark:
        with torch.cuda.stream(self._incoming):
            self._incoming.wait_event(after)
            try:
                copy()
            except BaseException:
                self._incoming.synchronize()  # the blocks may now be given to other requests
                raise
            brought = _record(self._incoming)
        with self._lock:
            self._behind.append((brought, num_bytes))
        return brought

    def join(self, brought: WorkMark) -> None:
        torch.cuda.current_stream(self._device).wait_event(brought)

    def backlog(self) -> WorkMark | None:
        with self._lock:
            while self._behind and self._behind[0][0].query():
                self._behind.popleft()
            left = sum(num_bytes for _, num_bytes in self._behind)
            for mark, num_bytes in self._behind:
                if left <= MAX_BEHIND_BYTES:
                    return None
                left -= num_bytes
                if left <= MAX_BEHIND_BYTES:
                    return mark
        return None

    def wait(self, mark: WorkMark) -> None:
        mark.synchronize()


class WatchedCopies:
    """Wraps a :class:`CopyQueue` and reports its errors before raising them.

    Args:
        on_error: called in the thread where the error occurs.
    """

    def __init__(self, queue: CopyQueue, on_error: Callable[[Exception], None]) -> None:
        self._queue = queue
        self._on_error = on_error

    def mark(self) -> WorkMark:
        with self._reporting():
            return self._queue.mark()

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        with self._reporting():
            return self._queue.host_memory(num_bytes)

    def fetch(self, copy: Callable[[], None], after: WorkMark) -> None:
        with self._reporting():
            self._queue.fetch(copy, after)

    def bring(self, copy: Callable[[], None], after: WorkMark, num_bytes: int) -> WorkMark:
        with self._reporting():
            return self._queue.bring(copy, after, num_bytes)

    def join(self, brought: WorkMark) -> None:
        with self._reporting():
            self._queue.join(brought)

    def backlog(self) -> WorkMark | None:
        with self._reporting():
            return self._queue.backlog()

    def wait(self, mark: WorkMark) -> None:
        with self._reporting():
            self._queue.wait(mark)

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._on_error(error)
            raise


def _record(stream: torch.cuda.Stream) -> WorkMark:
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # waiters sleep instead of spinning
    event.record(stream)
    return event


def copy_queue_for(device: torch.device) -> CopyQueue | None:
    """Returns ``None`` for a cache in the host's memory."""
    return CudaCopyQueue(device) if device.type == "cuda" else None
