"""The prefill worker's gRPC service."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import grpc.aio

from baton.core.errors import BatonError
from baton.core.logs import RequestLog
from baton.core.request import FinishReason, TokenOutput
from baton.core.request_ids import check_id, request_id_of_call
from baton.core.timeline import Event
from baton.engine.async_engine import AsyncEngine
from baton.rpc.bookings import BookingBoard
from baton.rpc.channel import as_baton_error, reporting_errors
from baton.rpc.conversions import pack_events, pack_output, pack_parts, unpack_sequence
from baton.rpc.credentials import ClusterSecret
from baton.rpc.prompt_logprobs import pack_prompt_logprobs
from baton.rpc.wire import worker_pb2, worker_pb2_grpc
from prefill_worker.kv_export import ExportSummary, KVExporter

logger = logging.getLogger(__name__)


class PrefillService(worker_pb2_grpc.PrefillServicer):
    """Computes prompts: streams the first token at once, then the result of the hand-off."""

    def __init__(
        self, engine: AsyncEngine, exporter: KVExporter, secret: ClusterSecret, bookings: BookingBoard
    ) -> None:
        self._engine = engine
        self._exporter = exporter
        self._secret = secret
        self._bookings = bookings
        # A second attempt may arrive before this worker learns that the first one has ended.
        self._num_calls = itertools.count(1)

    async def Prefill(  # noqa: N802 - named by the schema
        self, message: worker_pb2.PrefillRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """See ``proto/worker.proto``. Cancelling the call aborts the request and its transfer."""
        call_id = message.sequence.request_id
        log = RequestLog(logger, request_id_of_call(call_id))
        log.debug("a prompt arrived", extra={"prompt_tokens": len(message.sequence.prompt_token_ids)})
        async with reporting_errors(context, logger, call_id), aclosing(self._prefill(message)) as events:
            with self._bookings.booking_of(context) as booking:
                async for event in events:
                    booking.advance(len(event.first_token.token_ids))
                    await context.write(event)
                    _log_event(log, event)

    async def _prefill(self, message: worker_pb2.PrefillRequest) -> AsyncGenerator[worker_pb2.PrefillEvent]:
        events = {Event.PREFILL_QUEUED: time.monotonic()}
        if message.HasField("handoff"):
            check_id(message.handoff.transfer_id, "transfer_id")
            self._secret.check_peer(message.handoff.peer, message.handoff.peer_proof)
        request = unpack_sequence(
            message.sequence, self._engine.runner.loaded.eos_token_ids, events[Event.PREFILL_QUEUED]
        )
        request.request_id = f"{request.request_id}#{next(self._num_calls)}"
        request.hands_off = True
        self._engine.check_request(request)
        transfer: asyncio.Task[ExportSummary] | None = None
        if message.HasField("handoff"):
            transfer = self._exporter.start(request, message.handoff.transfer_id, message.handoff.peer, events)
        try:
            async with aclosing(self._engine.generate(request)) as outputs:
                output = await anext(outputs)  # the only output: the request is handed off or ends with it
            events[Event.FIRST_TOKEN_SAMPLED] = time.monotonic()
            events[Event.PREFILL_STARTED] = request.first_scheduled_s or events[Event.PREFILL_QUEUED]
            goes_on = output.finish_reason is FinishReason.HANDED_OFF
            for part in pack_prompt_logprobs(output.prompt_logprobs):
                yield worker_pb2.PrefillEvent(prompt_logprobs=part)
            yield worker_pb2.PrefillEvent(first_token=_first_token(output), events=pack_events(dict(events)))
            if goes_on and transfer is not None:
                result = await _handoff_result(transfer, message.sequence.request_id)
                yield worker_pb2.PrefillEvent(handoff=result, events=pack_events(events))
        finally:
            if transfer is not None:
                transfer.cancel()
                await asyncio.gather(transfer, return_exceptions=True)


def _first_token(output: TokenOutput) -> worker_pb2.TokenBatch:
    batch = pack_output(output)
    if output.finish_reason is FinishReason.HANDED_OFF:
        batch.finish_reason = ""
    return batch


def _log_event(log: RequestLog, event: worker_pb2.PrefillEvent) -> None:
    if event.HasField("first_token"):
        log.info("a prompt is computed", extra={"cached_tokens": event.first_token.num_cached_tokens})
    elif event.handoff.error_code:
        log.info("a hand-off failed: %s", event.handoff.error_message, extra={"code": event.handoff.error_code})
    elif event.HasField("handoff"):
        duration_ms = round(event.handoff.seconds * 1e3, 1)
        names = ("num_bytes", "num_shared_bytes", "num_spared_bytes")
        sizes = {name.removeprefix("num_"): getattr(event.handoff, name) for name in names}
        log.info("a hand-off ended", extra={**sizes, "duration_ms": duration_ms})


async def _handoff_result(transfer: asyncio.Task[ExportSummary], call_id: str) -> worker_pb2.HandoffResult:
    error: BatonError
    try:
        done = await transfer
    except BatonError as failure:
        error = failure
    except Exception as failure:
        log = RequestLog(logger, request_id_of_call(call_id))
        log.exception("a hand-off failed unexpectedly")
        error = as_baton_error(failure, call_id)
    else:
        return worker_pb2.HandoffResult(
            num_bytes=done.num_bytes,
            num_parts=done.num_parts,
            num_tokens=done.num_tokens,
            num_cached_tokens=done.num_cached_tokens,
            seconds=done.seconds,
            parts=pack_parts(done.parts),
            num_shared_bytes=done.num_shared_bytes,
            num_spared_bytes=done.num_spared_bytes,
        )
    return worker_pb2.HandoffResult(error_code=error.code, error_message=error.message)
