"""The decode worker's gRPC service."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import grpc.aio

from baton.core.errors import TransferError
from baton.core.logs import RequestLog
from baton.core.request import Request
from baton.core.request_ids import check_id, request_id_of_call
from baton.core.timeline import Event
from baton.engine.async_engine import AsyncEngine
from baton.rpc.bookings import BookingBoard
from baton.rpc.channel import reporting_errors
from baton.rpc.conversions import pack_events, pack_output, unpack_sequence
from baton.rpc.prompt_logprobs import pack_prompt_logprobs
from baton.rpc.wire import worker_pb2, worker_pb2_grpc
from decode_worker.kv_import import Import, KVImporter

logger = logging.getLogger(__name__)


class DecodeService(worker_pb2_grpc.DecodeServicer):
    """Continues sequences from imported KV, or from their tokens alone."""

    def __init__(self, engine: AsyncEngine, importer: KVImporter, bookings: BookingBoard) -> None:
        self._engine = engine
        self._importer = importer
        self._bookings = bookings
        # A second attempt may arrive before this worker learns that the first one has ended.
        self._num_calls = itertools.count(1)

    async def Generate(  # noqa: N802 - named by the schema
        self, message: worker_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """See ``proto/worker.proto``. Cancelling the call aborts the request."""
        call_id = message.sequence.request_id
        num_tokens = 0
        log = RequestLog(logger, request_id_of_call(call_id))
        log.debug("a decode request arrived", extra={"claims_kv": bool(message.transfer_id)})
        async with reporting_errors(context, logger, call_id), aclosing(self._generate(message)) as batches:
            with self._bookings.booking_of(context) as booking:
                async for batch in batches:
                    num_tokens += len(batch.token_ids)
                    booking.advance(len(batch.token_ids))
                    await context.write(batch)
        log.info("a sequence was decoded", extra={"tokens": num_tokens})

    async def Abandon(  # noqa: N802 - named by the schema
        self, message: worker_pb2.AbandonRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.AbandonReply:
        """See ``proto/worker.proto``."""
        self._importer.abandon(message.transfer_id)
        return worker_pb2.AbandonReply()

    async def _generate(self, message: worker_pb2.GenerateRequest) -> AsyncGenerator[worker_pb2.TokenBatch]:
        request = unpack_sequence(message.sequence, self._engine.runner.loaded.eos_token_ids, time.monotonic())
        request.request_id = f"{request.request_id}#{next(self._num_calls)}"
        self._engine.check_request(request)
        if message.transfer_id:
            check_id(message.transfer_id, "transfer_id")
        imported = await self._importer.claim(message.transfer_id) if message.transfer_id else None
        try:
            if imported is not None:
                _check_prompt(imported, request)
            async with aclosing(self._stream(request, imported)) as batches:
                async for batch in batches:
                    yield batch
        finally:
            if imported is not None:
                self._importer.release(imported)

    async def _stream(self, request: Request, imported: Import | None) -> AsyncGenerator[worker_pb2.TokenBatch]:
        received_s, request.arrival_s = request.arrival_s, time.monotonic()  # queueing begins when the KV has arrived
        events: dict[Event, float] = {Event.DECODE_RECEIVED: received_s, Event.DECODE_QUEUED: request.arrival_s}
        if imported is not None:
            events[Event.KV_COMMITTED] = imported.committed_s

        def adopt(adopting: Request) -> None:
            if imported is not None:
                self._importer.hand_over(imported, adopting)

        async with aclosing(self._engine.generate(request, adopt)) as outputs:
            async for output in outputs:
                for part in pack_prompt_logprobs(output.prompt_logprobs):
                    yield worker_pb2.TokenBatch(prompt_logprobs=part)
                batch = pack_output(output)
                if events:
                    events[Event.DECODE_STARTED] = request.first_scheduled_s or request.arrival_s
                    batch.events.extend(pack_events(events))
                    events = {}
                yield batch


def _check_prompt(imported: Import, request: Request) -> None:
    """Raises :class:`TransferError` when the KV belongs to another prompt."""
    holder = imported.holder
    if holder is None or (holder.prompt_token_ids, holder.cache_salt) != (request.prompt_token_ids, request.cache_salt):
        raise TransferError(f"transfer {imported.transfer_id} carried the KV of a different prompt.")
    if not request.output_token_ids:
        raise TransferError(
            f"request {request.request_id} claims imported KV, but does not know its first token, "
            "which the prefill worker sampled."
        )
