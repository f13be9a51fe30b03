"""Follows a prefill call after its first token: the hand-off's outcome, without holding up the tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from cluster.generation import TokenChunk
from cluster.messages import unpack_events
from cluster.metrics import RouterMetrics
from cluster.registry import Worker
from cluster.wire import worker_pb2
from engine.errors import BatonError, WorkerLostError, rebuild_error
from engine.timeline import Timeline


class HandoffWatch:
    """One prefill call. The worker counts as busy until the hand-off is over, not just until the first token."""

    def __init__(self, timeline: Timeline, worker: Worker, metrics: RouterMetrics) -> None:
        self._timeline = timeline
        self._worker = worker
        self._metrics = metrics
        self._first: asyncio.Future[worker_pb2.TokenBatch] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[BatonError | None] | None = None

    async def start(self, events: AsyncGenerator[worker_pb2.PrefillEvent]) -> worker_pb2.TokenBatch:
        """The first token.

        Raises:
            BatonError: prefill failed.
        """
        self._task = asyncio.create_task(self._follow(events))
        waits: list[asyncio.Future[Any]] = [self._first, self._task]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if not self._first.done():
            raise self._task.result() or WorkerLostError("the prefill worker ended its stream without a token")
        return self._first.result()

    async def guard(self, chunks: AsyncGenerator[TokenChunk]) -> AsyncGenerator[TokenChunk]:
        """Passes a decode stream on; until it has brought something, a failed hand-off ends it.

        Raises:
            BatonError: of the hand-off, or of the decode stream.
        """
        first = asyncio.ensure_future(anext(chunks, None))
        try:
            if self._task is not None:
                waits: list[asyncio.Future[Any]] = [first, self._task]
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                if not first.done() and (error := self._task.result()) is not None:
                    raise error
            chunk = await first
            if chunk is None:
                return
            yield chunk
            async for chunk in chunks:
                yield chunk
        finally:
            if not first.done():
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)
            await chunks.aclose()

    def finish(self, *, keep: bool) -> None:
        """Call it when the request is over: the hand-off's last word is awaited in the background, or not at all."""
        if self._task is not None and not keep:
            self._task.cancel()

    async def _follow(self, events: AsyncGenerator[worker_pb2.PrefillEvent]) -> BatonError | None:
        """Reads the call to its end; returns what went wrong with it."""
        with self._worker.assign():
            try:
                async for event in events:
                    self._worker.client.record(self._timeline, unpack_events(event.events))
                    if event.HasField("first_token"):
                        self._first.set_result(event.first_token)
                    else:
                        return self._book(event.handoff)
            except BatonError as error:
                return error
            finally:
                await events.aclose()
        return None

    def _book(self, result: worker_pb2.HandoffResult) -> BatonError | None:
        self._metrics.observe_handoff(result)
        if result.error_code:
            self._timeline.attributes["handoff_error"] = result.error_code
            return rebuild_error(result.error_code, result.error_message)
        self._timeline.attributes.update(
            kv_bytes=result.num_bytes,
            kv_parts=result.num_parts,
            kv_tokens=result.num_tokens,
            kv_cached_tokens=result.num_cached_tokens,
        )
        return None
