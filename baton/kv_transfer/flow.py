"""Flow control of a hand-off: a bandwidth cap, buffers in flight, and acknowledgements."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Any

import grpc.aio

from baton.kv_transfer.base import PartBuffer
from baton.rpc.wire import kv_pb2

_PAUSE_S = 0.002
_MAX_UNACKNOWLEDGED_BYTES = 4 * 1024 * 1024
"""Half of a sender's default limit of unacknowledged bytes."""


class Throttle:
    """A bandwidth cap: a token bucket over bytes. Callers are served in order. A burst lasts at most 0.1 s."""

    def __init__(self, bytes_per_second: float) -> None:
        if bytes_per_second <= 0:
            raise ValueError(f"bytes_per_second must be positive, got {bytes_per_second}")
        self._rate = bytes_per_second
        self._free_at_s = 0.0
        self._lock = asyncio.Lock()

    async def take(self, num_bytes: int) -> None:
        """Returns when ``num_bytes`` may be sent."""
        async with self._lock:
            now = time.monotonic()
            self._free_at_s = max(self._free_at_s, now - 0.1) + num_bytes / self._rate
            if self._free_at_s > now:
                await asyncio.sleep(self._free_at_s - now)


class BuffersInFlight:
    """The buffers of one transfer's parts. Each is kept until the receiver has acknowledged its part."""

    def __init__(self) -> None:
        self._buffers: deque[tuple[int, PartBuffer]] = deque()

    def sending(self, buffer: PartBuffer, end: int) -> None:
        """Adds a buffer, which holds the transfer's bytes up to ``end``."""
        self._buffers.append((end, buffer))

    def acknowledged(self, num_bytes: int) -> None:
        """Releases the buffers of the transfer's first ``num_bytes``, which the receiver has written."""
        while self._buffers and self._buffers[0][0] <= num_bytes:
            self._buffers.popleft()[1].release()

    def release_all(self) -> None:
        """Releases all buffers. A receiver that still reads detects reuse by the slots' generations."""
        while self._buffers:
            self._buffers.popleft()[1].release()


class Acknowledgements:
    """Tells the sender how much has been written, concurrently with the reading of further parts.

    Each reply wakes two threads at either end, which takes as long as copying a third of a megabyte. So replies within
    2 ms are merged into one, unless 4 MiB are waiting to be acknowledged.
    """

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self._context = context
        self._num_bytes = 0
        self._num_acknowledged = 0
        self._task: asyncio.Task[None] | None = None
        self._has_ended = False
        self._due = asyncio.Event()

    def written(self, num_bytes: int) -> None:
        """Acknowledges the transfer's first ``num_bytes``."""
        self._num_bytes = num_bytes
        if num_bytes - self._num_acknowledged >= _MAX_UNACKNOWLEDGED_BYTES:
            self._due.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._send())

    async def finish(self) -> None:
        """Waits until no reply is being written, so that the stream can be used for the final reply."""
        self._has_ended = True
        self._due.set()
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _send(self) -> None:
        try:
            while self._num_acknowledged < self._num_bytes and not self._has_ended:
                self._due.clear()
                self._num_acknowledged = self._num_bytes
                reply = kv_pb2.KVReply(received=kv_pb2.KVReceived(num_bytes=self._num_acknowledged))
                await self._context.write(reply.SerializeToString())
                await self._pause()
        except grpc.aio.BaseError:  # the call has ended, which the reading side reports
            return

    async def _pause(self) -> None:
        if self._has_ended or self._num_bytes - self._num_acknowledged >= _MAX_UNACKNOWLEDGED_BYTES:
            return
        timer = asyncio.get_running_loop().call_later(_PAUSE_S, self._due.set)
        try:
            await self._due.wait()
        finally:
            timer.cancel()
