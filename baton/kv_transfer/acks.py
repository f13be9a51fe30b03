"""How a receiver tells a sender what it has written."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio

from baton.rpc.wire import kv_pb2

_PAUSE_S = 0.002
_HURRY_BYTES = 4 * 1024 * 1024
"""Half of what a sender has on its way by default."""


class Acknowledgements:
    """Replies beside the reading of more, one at a time. Each wakes two threads at either end, which takes as long as
    copying a third of a megabyte, so those that would follow soon share one."""

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self._context = context
        self._num_bytes = 0
        self._num_told = 0
        self._task: asyncio.Task[None] | None = None
        self._is_over = False
        self._due = asyncio.Event()

    def written(self, num_bytes: int) -> None:
        """Of all parts together."""
        self._num_bytes = num_bytes
        if num_bytes - self._num_told >= _HURRY_BYTES:
            self._due.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._send())

    async def finish(self) -> None:
        """Waits until none is on its way; the stream is free for other replies then, which tell the rest."""
        self._is_over = True
        self._due.set()
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _send(self) -> None:
        try:
            while self._num_told < self._num_bytes and not self._is_over:
                self._due.clear()
                self._num_told = self._num_bytes
                reply = kv_pb2.KVReply(received=kv_pb2.KVReceived(num_bytes=self._num_told))
                await self._context.write(reply.SerializeToString())
                await self._pause()
        except grpc.aio.BaseError:  # the call is over, as the reading side hears too
            return

    async def _pause(self) -> None:
        if self._is_over or self._num_bytes - self._num_told >= _HURRY_BYTES:
            return
        timer = asyncio.get_running_loop().call_later(_PAUSE_S, self._due.set)
        try:
            await self._due.wait()
        finally:
            timer.cancel()
