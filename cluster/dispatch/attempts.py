"""One attempt of a request on the workers that were chosen for it.

* pair: prefill → first token → (KV transfer) → decode
* alone: a decode worker computes the prompt and all tokens so far, for local prefill or after a worker was lost
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from math import isfinite

from baton.core.errors import (
    BatonError,
    ChecksumError,
    InternalError,
    LayoutMismatchError,
    OutOfBlocksError,
    RequestCancelledError,
    TransferError,
    WorkerLostError,
)
from baton.core.timeline import Event, Timeline
from baton.process.background import BackgroundTasks
from baton.rpc.conversions import pack_queue_priority, pack_sequence, unpack_events
from baton.rpc.prompt_logprobs import PromptLogprobsReader
from baton.rpc.wire import worker_pb2
from cluster.dispatch.handoff_watch import HandoffWatch
from cluster.registry.workers import Worker
from cluster.requests.generation import TokenChunk
from cluster.requests.request_observers import RequestObservers
from cluster.requests.request_record import RequestRecord
from cluster.routing.dispatcher import Placement

RETRYABLE = (
    WorkerLostError,
    TransferError,
    ChecksumError,
    LayoutMismatchError,
    OutOfBlocksError,
    # The router's own cancellations never come back as errors, so the worker ended the call.
    RequestCancelledError,
)
"""Errors after which another attempt may succeed."""
_BLAMED = (*RETRYABLE, InternalError)
"""Errors after which the next attempt prefers other workers."""
_ACCUSED = (WorkerLostError, InternalError)
"""Errors that a worker or the request may have caused."""
_PROOF_TOKENS = 16
"""A request that has produced this many tokens did not cause the failure of earlier attempts."""


class Attempts:
    """Runs attempts of requests.

    Args:
        background: runs tasks that outlive a request: the end of a hand-off, measurements of clocks.
        check: asks the worker with this id whether it is there, and judges it before it returns, soon.
        clock: monotonic seconds; a simulation passes virtual time.
    """

    def __init__(
        self,
        observers: RequestObservers,
        background: BackgroundTasks,
        check: Callable[[str], Awaitable[None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._observers = observers
        self._background = background
        self._check = check
        self._clock = clock

    def run(self, record: RequestRecord, placement: Placement) -> AsyncGenerator[TokenChunk]:
        """Yields tokens that the client does not have yet, until the request is finished.

        Raises:
            BatonError: the attempt failed; the record names the worker at fault, if there is one.
        """
        for worker in placement.workers:
            if worker.client.needs_sync:
                self._background.spawn(worker.sync_clock())
        if not record.token_ids:
            record.layout = placement.decode.info.kv_fingerprint
        if placement.prefill is None:
            return _judged(self._alone(record, placement), record, placement)
        return _judged(self._pair(record, placement, placement.prefill), record, placement)

    async def _pair(self, record: RequestRecord, placement: Placement, prefill: Worker) -> AsyncGenerator[TokenChunk]:
        """Prefill on one worker, decode on another."""
        decode, timeline = placement.decode, record.timeline
        timeline.replace(Event.ROUTED)
        timeline.attributes.update(prefill_worker=prefill.info.worker_id, decode_worker=decode.info.worker_id)
        call_id = record.new_call_id()
        message = worker_pb2.PrefillRequest(sequence=self._sequence(record, call_id))
        if record.request.params.max_tokens > 1:
            message.handoff.transfer_id = call_id
            message.handoff.peer = decode.info.address
            message.handoff.peer_proof = decode.info.peer_proof
        reader = _prompt_reader(record, prefill)
        watch = HandoffWatch(record, placement, self._observers, self._background, reader)
        is_claimed = False
        try:
            booking = self._booking(record, prefill)
            first = await watch.start(prefill.client.prefill(message, record.time_left_s, booking))
            record.num_cached_tokens = first.num_cached_tokens
            yield self._take_first(record, prefill, first, reader)
            if not record.is_finished:
                batches = self._decode(record, placement, call_id, call_id)
                async with aclosing(watch.guard(batches)) as chunks:
                    async for chunk in chunks:
                        is_claimed = True  # the decode call owns the KV and frees it when it ends
                        yield chunk
        except _BLAMED as error:
            # While the outcome of a hand-off is unknown, either end may be lost.
            suspects = (prefill,) if watch.is_broken else (decode, prefill) if watch.is_open else (decode,)
            await self._blame(record, error, *suspects)
            if isinstance(error, TransferError) and not prefill.suspicion:
                record.accused.append(decode)
            raise
        finally:
            await watch.close(keep=record.is_finished)
            if message.HasField("handoff") and not (is_claimed or record.is_finished):
                self._background.spawn(decode.client.abandon(call_id))

    async def _alone(self, record: RequestRecord, placement: Placement) -> AsyncGenerator[TokenChunk]:
        """A decode worker computes all known tokens by itself and continues from there."""
        timeline, decode = record.timeline, placement.decode
        timeline.attributes["decode_worker"] = decode.info.worker_id
        if not record.token_ids:
            timeline.replace(Event.ROUTED)
            timeline.attributes.pop("prefill_worker", None)  # set by an earlier attempt
            timeline.attributes["local_worker"] = decode.info.worker_id
        try:
            async with aclosing(self._decode(record, placement, record.new_call_id())) as chunks:
                async for chunk in chunks:
                    yield chunk
        except _BLAMED as error:
            await self._blame(record, error, decode)
            raise

    async def _decode(
        self, record: RequestRecord, placement: Placement, call_id: str, transfer_id: str = ""
    ) -> AsyncGenerator[TokenChunk]:
        timeline, worker, has_second = record.timeline, placement.decode, False
        sequence = self._sequence(record, call_id, record.request.speculation_method)
        message = worker_pb2.GenerateRequest(sequence=sequence, transfer_id=transfer_id)
        booking, reader = self._booking(record, worker), _prompt_reader(record, worker)
        async with aclosing(worker.client.generate(message, record.time_left_s, booking)) as batches:
            async for batch in batches:
                if batch.HasField("prompt_logprobs"):
                    reader.take(batch.prompt_logprobs)
                    continue
                if not record.token_ids:
                    _record_local_prefill(timeline, worker, batch)
                    record.num_cached_tokens = batch.num_cached_tokens
                    yield self._take_first(record, worker, batch, reader)
                    continue
                if batch.events:
                    worker.client.record(timeline, unpack_events(batch.events))
                if not has_second:
                    has_second = True
                    timeline.record(Event.SECOND_TOKEN)
                worker.client.record_steps(timeline.decode_steps, batch, len(record.token_ids))
                yield record.take(batch, worker.info.vocab_size)
        if not record.is_finished:
            raise WorkerLostError(f"{worker.info.worker_id} ended its stream without finishing the request")

    async def _blame(self, record: RequestRecord, error: BatonError, *workers: Worker) -> None:
        """Makes the next attempt avoid these workers, or only those of them that are suspected, if any is."""
        if not any(worker.suspicion for worker in workers):
            await asyncio.gather(*(self._check(worker.info.worker_id) for worker in workers))
        suspects = [worker for worker in workers if worker.suspicion]
        record.failed_on.update(worker.info.worker_id for worker in suspects or workers)
        if isinstance(error, _ACCUSED) and len(workers) == 1 and not suspects:
            record.accused.extend(workers)

    def _take_first(
        self, record: RequestRecord, worker: Worker, batch: worker_pb2.TokenBatch, reader: PromptLogprobsReader
    ) -> TokenChunk:
        prompt_logprobs, timeline = reader.finish(), record.timeline
        chunk = record.take(batch, worker.info.vocab_size)
        timeline.record(Event.FIRST_TOKEN)
        timeline.decode_steps.follow(timeline.events[Event.FIRST_TOKEN])
        return replace(chunk, prompt_logprobs=prompt_logprobs)

    def _booking(self, record: RequestRecord, worker: Worker) -> worker_pb2.Booking | None:
        """What a worker of the request's route tells other routers; ``None`` if there are none."""
        booking = record.booking
        if booking is None or not booking.router_id:
            return None
        computes = booking.computing_id == worker.info.worker_id
        return worker_pb2.Booking(
            router=booking.router_id,
            name=booking.name,
            uncached_tokens=booking.uncached_tokens if computes else 0,
            cached_tokens=booking.cached_tokens,
            queue_priority=pack_queue_priority(record.queue_priority, self._clock()),
            decode_worker=booking.decode_id if booking.decodes else "",
            num_tokens=len(record.request.prompt_token_ids) + len(record.token_ids),
            expected_tokens=booking.expected_tokens,
            tpot_target_s=record.request.slo.tpot_s if isfinite(record.request.slo.tpot_s) else 0.0,
        )

    def _sequence(
        self, record: RequestRecord, call_id: str, speculation_method: str | None = None
    ) -> worker_pb2.Sequence:
        request, params = record.request, record.request.params
        if params.prompt_logprobs != _missing_logprobs(record):
            params = replace(params, prompt_logprobs=None)
        return pack_sequence(
            call_id,
            request.prompt_token_ids,
            params,
            record.token_ids,
            speculation_method,
            record.queue_priority,
            request.slo.tpot_s,
            self._clock(),
            request.cache_salt,
            is_traced=request.is_traced,
        )


def _missing_logprobs(record: RequestRecord) -> int | None:
    """What the request's workers must find of its prompt: the client gets it with the first token."""
    return None if record.token_ids else record.request.params.prompt_logprobs


def _prompt_reader(record: RequestRecord, worker: Worker) -> PromptLogprobsReader:
    num_prompt_tokens = len(record.request.prompt_token_ids)
    return PromptLogprobsReader(num_prompt_tokens, _missing_logprobs(record), worker.info.vocab_size)


def _record_local_prefill(timeline: Timeline, worker: Worker, batch: worker_pb2.TokenBatch) -> None:
    """Records the work of a decode worker up to the first token as prefill."""
    events = unpack_events(batch.events)
    names = {Event.DECODE_QUEUED: Event.PREFILL_QUEUED, Event.DECODE_STARTED: Event.PREFILL_STARTED}
    received = {name: events[event] for event, name in names.items() if event in events}
    if batch.steps:
        received[Event.FIRST_TOKEN_SAMPLED] = batch.steps[-1].ended_s
    worker.client.record(timeline, received)
    worker.client.record_steps(timeline.prefill_steps, batch, 0)


async def _judged(
    chunks: AsyncGenerator[TokenChunk], record: RequestRecord, placement: Placement
) -> AsyncGenerator[TokenChunk]:
    """Passes on the chunks of an attempt. If it succeeds, the accused workers of earlier attempts count as failed."""
    num_tokens = 0
    async with aclosing(chunks):
        try:
            async for chunk in chunks:
                num_tokens += len(chunk.token_ids)
                if record.is_finished or num_tokens >= _PROOF_TOKENS:
                    for worker in record.accused:
                        worker.failed()
                    record.accused.clear()
                yield chunk
        finally:
            if record.is_finished:
                for worker in placement.workers:
                    worker.succeeded()
