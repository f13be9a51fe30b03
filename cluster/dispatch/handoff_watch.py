"""Follows a prefill call after its first token, to learn the outcome of the hand-off without delaying tokens."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from baton.core.errors import BatonError, InternalError, TransferError, WorkerLostError, rebuild_error
from baton.core.logs import RequestLog
from baton.process.background import BackgroundTasks
from baton.rpc.conversions import unpack_events
from baton.rpc.prompt_logprobs import PromptLogprobsReader
from baton.rpc.wire import worker_pb2
from cluster.requests.generation import TokenChunk
from cluster.requests.request_observers import RequestObservers
from cluster.requests.request_record import RequestRecord
from cluster.routing.dispatcher import Placement

logger = logging.getLogger(__name__)


class HandoffWatch:
    """Follows one prefill call. The worker stays booked until the hand-off ends, beyond the first token.

    Args:
        background: continues the call if the request has ended and the hand-off has not.
        prompt_logprobs: reads those of the prompt.
    """

    def __init__(
        self,
        record: RequestRecord,
        placement: Placement,
        observers: RequestObservers,
        background: BackgroundTasks,
        prompt_logprobs: PromptLogprobsReader,
    ) -> None:
        if placement.prefill is None:
            raise RuntimeError("without a prefill worker there is no hand-off")
        self._record = record
        self._timeline = record.timeline
        self._placement = placement
        self._worker = placement.prefill
        self._observers = observers
        self._background = background
        self._prompt_logprobs = prompt_logprobs
        self._first: asyncio.Future[worker_pb2.TokenBatch] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[BatonError | None] | None = None
        self.is_broken = False
        """The call itself failed, so the prefill worker is at fault. False if the worker reports a failed hand-off."""

    @property
    def is_open(self) -> bool:
        """The outcome of the hand-off is not known yet."""
        return self._task is not None and not self._task.done()

    async def start(self, events: AsyncGenerator[worker_pb2.PrefillEvent]) -> worker_pb2.TokenBatch:
        """Waits for the first token; the prompt's log probabilities have arrived by then.

        Raises:
            BatonError: prefill failed.
        """
        done = self._placement.keep_prefill()
        self._task = self._background.spawn(self._follow(events))
        self._task.add_done_callback(lambda _: done())
        waits: list[asyncio.Future[Any]] = [self._first, self._task]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if not self._first.done():
            self.is_broken = True
            raise self._task.result() or WorkerLostError("the prefill worker ended its stream without a token")
        return self._first.result()

    async def guard(self, chunks: AsyncGenerator[TokenChunk]) -> AsyncGenerator[TokenChunk]:
        """Passes on a decode stream. A failed hand-off ends it, unless it has yielded a chunk before.

        Raises:
            TransferError: the hand-off failed.
            BatonError: the decode stream failed.
        """
        async with aclosing(chunks):
            first = asyncio.ensure_future(anext(chunks, None))
            try:
                await self._first_of(first)
                chunk = await first
            finally:
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)
            if chunk is None:
                return
            yield chunk
            async for chunk in chunks:
                yield chunk

    async def close(self, *, keep: bool) -> None:
        """Stops following the call. Must be called when the request has ended.

        Args:
            keep: continue in the background until the outcome is known, instead of cancelling the call.
        """
        if self._task is not None and not keep:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _first_of(self, decode: asyncio.Future[TokenChunk | None]) -> None:
        """Waits for ``decode``. Raises :class:`TransferError` if the hand-off fails before it is done."""
        if self._task is None:
            return
        waits: list[asyncio.Future[Any]] = [decode, self._task]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if not decode.done() and (error := self._task.result()) is not None:
            # A TransferError is retryable: another attempt can continue from the tokens alone.
            raise TransferError(f"The KV hand-off failed ({error.code}): {error.message}") from error

    async def _follow(self, events: AsyncGenerator[worker_pb2.PrefillEvent]) -> BatonError | None:
        """Reads the call to its end. Returns its error, or ``None`` if it succeeded."""
        try:
            async with aclosing(events):
                async for event in events:
                    self._worker.client.record(self._timeline, unpack_events(event.events))
                    if event.HasField("handoff"):
                        return self._book(event.handoff)
                    if self._first.done():
                        raise InternalError("the prefill worker sent more of the prompt after its first token")
                    if event.HasField("prompt_logprobs"):
                        self._prompt_logprobs.take(event.prompt_logprobs)
                        continue
                    self._prompt_logprobs.finish()
                    self._worker.client.record_steps(self._timeline.prefill_steps, event.first_token, 0)
                    self._first.set_result(event.first_token)
            if self._first.done() and not self._first.result().finish_reason:
                raise WorkerLostError("the prefill worker ended its stream without reporting the hand-off")
        except BatonError as error:
            self.is_broken = True
            return error
        except Exception as error:
            log = RequestLog(logger, self._timeline.request_id)
            log.exception("following the prefill failed")
            self.is_broken = True
            return InternalError(f"following the prefill failed ({type(error).__name__}); see the router's log")
        return None

    def _book(self, result: worker_pb2.HandoffResult) -> BatonError | None:
        self._observers.handed_off(self._record, result)
        self._worker.client.record_parts(self._timeline, result.parts)
        if result.error_code:
            self._timeline.attributes["handoff_error"] = result.error_code
            return rebuild_error(result.error_code, result.error_message)
        self._timeline.attributes.update(
            kv_bytes=result.num_bytes,
            kv_shared_bytes=result.num_shared_bytes,
            kv_spared_bytes=result.num_spared_bytes,
            kv_parts=result.num_parts,
            kv_tokens=result.num_tokens,
            kv_cached_tokens=result.num_cached_tokens,
        )
        return None
