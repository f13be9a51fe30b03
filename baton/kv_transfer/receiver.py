"""KV over gRPC, the receiving end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from baton.core.errors import BatonError, LayoutMismatchError, TransferError
from baton.core.kv_spec import KVCacheSpec, KVEncoding
from baton.core.logs import RequestLog
from baton.core.request_ids import request_id_of_call
from baton.kv_transfer.acks import Acknowledgements
from baton.kv_transfer.base import KVSink, TransferOffer
from baton.kv_transfer.codec import decode_frame, encoding_name
from baton.kv_transfer.payload.connection_reader import ConnectionReader
from baton.kv_transfer.payload.data_listener import DataListener, ExpectedConnections
from baton.kv_transfer.payload.nixl_reader import NixlReader
from baton.kv_transfer.payload.part_intake import PartIntake, SenderMemory
from baton.kv_transfer.payload.segment_mappings import SegmentMappings
from baton.kv_transfer.sender import METHOD, SERVICE
from baton.rpc.channel import as_baton_error, reporting_errors
from baton.rpc.wire import kv_pb2

logger = logging.getLogger(__name__)

_MAX_DEADLINE_S = 86_400.0
_KNOWN_ENCODINGS = {encoding.value: encoding for encoding in KVEncoding}
SILENCE_S = 600.0
"""What ``router.request_timeout_s`` is by default."""


class KVTransferService:
    """Feeds a :class:`KVSink` from the stream, and gives everything back if the stream breaks.

    Args:
        mappings: for the memory of senders on this host; None: none of it is read.
        listener: for connections that bring payloads beside messages; None: there are none. Started and stopped by
            whoever made it.
        silence_s: a sender that sends nothing for so long has gone without a word. Between two parts lies what its
            prompt takes to compute, so this must be more than any prompt may take.
        nixl: for the memory of other senders; None: it is not read. Closed by whoever made it.
    """

    def __init__(
        self,
        sink: KVSink,
        mappings: SegmentMappings | None = None,
        silence_s: float = SILENCE_S,
        listener: DataListener | None = None,
        nixl: NixlReader | None = None,
    ) -> None:
        self._sink = sink
        self._mappings = mappings
        self._listener = listener or DataListener()
        self._silence_s = silence_s
        self._nixl = nixl

    def add_to(self, server: grpc.aio.Server) -> None:
        # No (de)serializers: frames stay raw bytes, see codec.py.
        handler = grpc.stream_stream_rpc_method_handler(self._transfer)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))

    async def _transfer(self, _: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        first = await context.read()
        if first is grpc.aio.EOF:
            return
        transfer_id = _transfer_id_of(first)
        async with reporting_errors(context, logger, transfer_id):
            try:
                await self._receive(context, first)
            except grpc.aio.BaseError:  # the call is over
                raise
            except Exception as error:
                failure = as_baton_error(error, transfer_id)
                failed = kv_pb2.KVFailed(code=failure.code, message=failure.message)
                await _reply(context, kv_pb2.KVReply(failed=failed))
                raise

    async def _receive(self, context: grpc.aio.ServicerContext[Any, Any], first: bytes) -> None:
        header, _ = decode_frame(first)
        if header.WhichOneof("kind") != "reserve":
            raise TransferError(f"a KV transfer began with a frame of kind {header.WhichOneof('kind')}, not reserve.")
        offer = _offer_of(header.reserve)
        reservation = await self._sink.reserve(offer)
        committed = False
        reason = "the sender went away"
        try:
            async with self._sender_memory(header.reserve) as memory:
                with self._listener.expect(wanted=header.reserve.connects and memory is None) as expected:
                    reserved = kv_pb2.KVReserved(
                        num_cached_tokens=reservation.num_cached_tokens,
                        takes_draft=reservation.takes_draft,
                        takes_segment=memory is not None,
                        encoding=encoding_name(reservation.encoding),
                        connection=None if expected is None else expected.offer,
                    )
                    await _reply(context, kv_pb2.KVReply(reserved=reserved))
                    draft_state = await self._take_parts(context, offer.transfer_id, memory, expected)
            num_bytes = await self._sink.commit(offer.transfer_id, draft_state)
            committed = True
            await _reply(context, kv_pb2.KVReply(committed=kv_pb2.KVCommitted(num_bytes=num_bytes)))
            log = RequestLog(logger, request_id_of_call(offer.transfer_id))
            log.info("KV arrived", extra={"bytes": num_bytes, "cached_tokens": reservation.num_cached_tokens})
        except grpc.aio.BaseError:
            raise
        except Exception as error:
            reason = as_baton_error(error, offer.transfer_id).message
            raise
        finally:
            if not committed:
                self._sink.abort(offer.transfer_id, reason)

    @asynccontextmanager
    async def _sender_memory(self, reserve: kv_pb2.KVReserve) -> AsyncIterator[SenderMemory | None]:
        """The sender's segment, if there is one and this process can read it."""
        segment = reserve.segment if reserve.HasField("segment") else None
        if segment is not None and self._mappings is not None:
            mapped = self._mappings.attach(segment)
            if mapped is not None:
                try:
                    yield mapped
                finally:
                    self._mappings.detach(mapped)
                return
        if segment is not None and self._nixl is not None and segment.HasField("nixl"):
            async with self._nixl.attached(segment) as readable:
                yield readable
            return
        yield None

    async def _take_parts(
        self,
        context: grpc.aio.ServicerContext[Any, Any],
        transfer_id: str,
        memory: SenderMemory | None,
        expected: ExpectedConnections | None,
    ) -> bytes | None:
        """Writes parts until the commit comes; gives the draft's state that is in it."""
        acknowledgements = Acknowledgements(context)
        intake = PartIntake(self._sink, transfer_id, memory, acknowledgements.written)
        reader = None if expected is None else ConnectionReader(expected, intake, self._silence_s)
        try:
            return await self._take_frames(context, intake, reader)
        finally:
            if reader is not None:
                await reader.close()
            await acknowledgements.finish()

    async def _take_frames(
        self, context: grpc.aio.ServicerContext[Any, Any], intake: PartIntake, reader: ConnectionReader | None
    ) -> bytes | None:
        while (data := await self._next_frame(context, reader)) is not grpc.aio.EOF:
            header, payload = decode_frame(data)
            kind = header.WhichOneof("kind")
            if kind == "commit":
                commit = header.commit
                if reader is not None:
                    await reader.beside(intake.reach(commit.num_parts))
                if (commit.num_parts, commit.num_bytes) != (intake.num_parts, intake.num_bytes):
                    raise TransferError(
                        f"{commit.num_parts} KV parts with {commit.num_bytes} bytes were sent, "
                        f"{intake.num_parts} with {intake.num_bytes} bytes arrived."
                    )
                return commit.draft_state if commit.HasField("draft_state") else None
            if kind != "part":
                raise TransferError(f"a KV frame of kind {kind} came out of order.")
            await intake.from_message(header.part, payload)
        raise TransferError("the sender ended the stream without a commit.")

    async def _next_frame(self, context: grpc.aio.ServicerContext[Any, Any], reader: ConnectionReader | None) -> Any:
        if reader is not None:
            return await reader.beside(context.read())
        try:
            async with asyncio.timeout(self._silence_s):
                return await context.read()
        except TimeoutError:
            raise TransferError(f"the sender sent nothing for {self._silence_s:g} s.") from None


async def _reply(context: grpc.aio.ServicerContext[Any, Any], reply: kv_pb2.KVReply) -> None:
    await context.write(reply.SerializeToString())


def _transfer_id_of(frame: bytes) -> str:
    """Empty when the frame begins no transfer; whoever reads it next says what is wrong with it."""
    try:
        return decode_frame(frame)[0].reserve.transfer_id
    except BatonError:
        return ""


def _offer_of(reserve: kv_pb2.KVReserve) -> TransferOffer:
    if not reserve.transfer_id:
        raise TransferError("a KV transfer needs a transfer_id.")
    if not 0 <= reserve.deadline_s <= _MAX_DEADLINE_S:
        raise TransferError(f"deadline_s must be between 0 and {_MAX_DEADLINE_S:g} seconds, got {reserve.deadline_s}.")
    try:
        spec = KVCacheSpec.from_json(reserve.spec_json)
        fingerprint = spec.fingerprint()
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise LayoutMismatchError(f"the sender's KV layout cannot be read: {error}") from error
    if fingerprint != reserve.spec_fingerprint:
        raise LayoutMismatchError("the sender's KV layout does not match its own fingerprint.")
    return TransferOffer(
        reserve.transfer_id,
        reserve.request_id,
        spec,
        tuple(reserve.token_ids),
        reserve.deadline_s,
        tuple(_KNOWN_ENCODINGS[name] for name in reserve.encodings if name in _KNOWN_ENCODINGS),
    )
