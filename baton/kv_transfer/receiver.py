"""The receiving end of hand-offs: one gRPC stream per transfer. Payload paths deliver the bytes of parts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import grpc
import grpc.aio

from baton.core.errors import BatonError, LayoutMismatchError, OutOfBlocksError, TransferError
from baton.core.kv_spec import KVCacheSpec, KVEncoding
from baton.core.logs import RequestLog
from baton.core.request_ids import MAX_ID_CHARS, check_id, request_id_of_call
from baton.kv_transfer.base import KVSink, TransferOffer
from baton.kv_transfer.codec import decode_frame, encoding_name
from baton.kv_transfer.flow import Acknowledgements
from baton.kv_transfer.payload.base import PartIntake, PartReceiver, ReceivePath
from baton.kv_transfer.sender import METHOD, SERVICE
from baton.rpc.channel import abort_with, as_baton_error, reporting_errors
from baton.rpc.wire import kv_pb2

logger = logging.getLogger(__name__)
T = TypeVar("T")

_MAX_OPEN_TRANSFERS = 1024
_LONGEST_WAIT_S = 30.0
_KNOWN_ENCODINGS = {encoding.value: encoding for encoding in KVEncoding}
SILENCE_S = 30.0
"""Senders show that they live every :data:`baton.kv_transfer.sender.ALIVE_EVERY_S`."""


class KVTransferService:
    """Feeds a :class:`KVSink` from the stream, and frees everything if the stream breaks.

    Args:
        paths: payload paths in order of preference; the last one must accept every transfer.
        silence_s: a sender that sends nothing for this long is considered lost.
        longest_wait_s: limit of the time that a sender may let its reservation wait for room.
    """

    def __init__(
        self,
        sink: KVSink,
        paths: Sequence[ReceivePath],
        silence_s: float = SILENCE_S,
        longest_wait_s: float = _LONGEST_WAIT_S,
    ) -> None:
        self._sink = sink
        self._paths = paths
        self._silence_s = silence_s
        self._longest_wait_s = longest_wait_s
        self._num_open = 0

    def start(self, host: str) -> None:
        """Lets the payload paths listen at ``host``, the address at which senders reach this worker."""
        for path in self._paths:
            path.start(host)

    async def close(self) -> None:
        """Closes the payload paths."""
        for path in self._paths:
            await path.close()

    def add_to(self, server: grpc.aio.Server) -> None:
        # Without (de)serializers, frames stay raw bytes; see codec.py.
        handler = grpc.stream_stream_rpc_method_handler(self._transfer)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))

    async def _transfer(self, _: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self._num_open += 1
        try:
            first = await self._first_frame(context)
            if first is not grpc.aio.EOF:
                await self._answer(context, first)
        finally:
            self._num_open -= 1

    async def _first_frame(self, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            async with asyncio.timeout(self._silence_s):
                return await context.read()
        except TimeoutError:
            await abort_with(context, self._silent())

    async def _answer(self, context: grpc.aio.ServicerContext[Any, Any], first: bytes) -> None:
        transfer_id = _transfer_id_of(first)
        async with reporting_errors(context, logger, transfer_id):
            try:
                await self._receive(context, first)
            except grpc.aio.BaseError:  # the call has ended
                raise
            except Exception as error:
                failure = as_baton_error(error, transfer_id)
                failed = kv_pb2.KVFailed(code=failure.code, message=failure.message)
                await _reply(context, kv_pb2.KVReply(failed=failed))
                raise

    async def _receive(self, context: grpc.aio.ServicerContext[Any, Any], first: bytes) -> None:
        header, _ = decode_frame(first)
        if header.WhichOneof("kind") != "reserve":
            raise TransferError(
                f"a KV transfer began with a frame of kind {header.WhichOneof('kind')}, expected reserve."
            )
        if self._num_open > _MAX_OPEN_TRANSFERS:
            raise OutOfBlocksError(f"The decode worker has {_MAX_OPEN_TRANSFERS} open transfers and takes no more now.")
        offer = _offer_of(header.reserve, self._longest_wait_s)
        reservation = await self._sink.reserve(offer)
        committed = False
        reason = "the sender disconnected"
        try:
            reserved = kv_pb2.KVReserved(
                num_cached_tokens=reservation.num_cached_tokens,
                takes_draft=reservation.takes_draft,
                encoding=encoding_name(reservation.encoding),
            )
            draft_state = await self._take_parts(context, header.reserve, reserved)
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

    async def _take_parts(
        self,
        context: grpc.aio.ServicerContext[Any, Any],
        reserve: kv_pb2.KVReserve,
        reserved: kv_pb2.KVReserved,
    ) -> bytes | None:
        """Answers the reservation and writes parts until the commit; returns the commit's draft state."""
        acknowledgements = Acknowledgements(context)
        intake = PartIntake(self._sink, reserve.transfer_id, acknowledgements.written)
        try:
            async with self._accept(reserve, reserved, intake) as parts:
                await _reply(context, kv_pb2.KVReply(reserved=reserved))
                return await self._take_frames(context, intake, parts)
        finally:
            await acknowledgements.finish()

    @asynccontextmanager
    async def _accept(
        self, reserve: kv_pb2.KVReserve, reserved: kv_pb2.KVReserved, intake: PartIntake
    ) -> AsyncIterator[PartReceiver]:
        """Negotiates the path that delivers the parts."""
        for path in self._paths:
            async with path.accept(reserve, reserved, intake) as parts:
                if parts is not None:
                    yield parts
                    return
        raise RuntimeError("no payload path accepts the transfer; the last path must accept every transfer")

    async def _take_frames(
        self, context: grpc.aio.ServicerContext[Any, Any], intake: PartIntake, parts: PartReceiver
    ) -> bytes | None:
        while (data := await self._wait_for(context.read(), intake, parts)) is not grpc.aio.EOF:
            header, payload = decode_frame(data)
            kind = header.WhichOneof("kind")
            if kind == "commit":
                commit = header.commit
                if parts.reading is not None:  # the commit may overtake parts
                    await self._wait_for(intake.reach(commit.num_parts), intake, parts)
                if (commit.num_parts, commit.num_bytes) != (intake.num_parts, intake.num_bytes):
                    raise TransferError(
                        f"{commit.num_parts} KV parts with {commit.num_bytes} bytes were sent, "
                        f"{intake.num_parts} with {intake.num_bytes} bytes arrived."
                    )
                return commit.draft_state if commit.HasField("draft_state") else None
            if kind == "alive":
                continue
            if kind != "part":
                raise TransferError(f"a KV frame of kind {kind} is out of order.")
            await parts.receive(header.part, payload)
        raise TransferError("the sender ended the stream without a commit.")

    async def _wait_for(self, event: Coroutine[Any, Any, T], intake: PartIntake, parts: PartReceiver) -> T:
        """Waits for ``event``, while parts may arrive outside the stream.

        Raises:
            BatonError: such a part is faulty, or nothing at all arrived for ``silence_s``.
        """
        if parts.reading is None:
            try:
                async with asyncio.timeout(self._silence_s):
                    return await event
            except TimeoutError:
                raise self._silent() from None
        waited = asyncio.ensure_future(event)
        waited.add_done_callback(lambda done: done.cancelled() or done.exception())  # if the transfer ends first
        try:
            while True:
                events: set[asyncio.Future[Any]] = {waited}
                if parts.reading.done():
                    parts.reading.result()  # raises its error, even one from before this wait
                else:
                    events.add(parts.reading)
                if waited.done():
                    return waited.result()
                num_parts = intake.num_parts
                done, _ = await asyncio.wait(events, timeout=self._silence_s, return_when=asyncio.FIRST_COMPLETED)
                if not done and num_parts == intake.num_parts:
                    raise self._silent()
        finally:
            waited.cancel()

    def _silent(self) -> TransferError:
        return TransferError(f"the sender sent nothing for {self._silence_s:g} s.")


async def _reply(context: grpc.aio.ServicerContext[Any, Any], reply: kv_pb2.KVReply) -> None:
    await context.write(reply.SerializeToString())


def _transfer_id_of(frame: bytes) -> str:
    """The transfer's id for logs; empty when the frame does not begin a transfer, which is an error later."""
    try:
        return decode_frame(frame)[0].reserve.transfer_id[:MAX_ID_CHARS]
    except BatonError:
        return ""


def _offer_of(reserve: kv_pb2.KVReserve, longest_wait_s: float) -> TransferOffer:
    check_id(reserve.transfer_id, "transfer_id")
    if not reserve.deadline_s >= 0:  # also refuses NaN
        raise TransferError(f"deadline_s must be at least 0 seconds, got {reserve.deadline_s}.")
    try:
        spec = KVCacheSpec.from_json(reserve.spec_json)
        fingerprint = spec.fingerprint()
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise LayoutMismatchError(f"the sender's KV layout cannot be read: {error}") from error
    if fingerprint != reserve.spec_fingerprint:
        raise LayoutMismatchError("the sender's KV layout does not match its own fingerprint.")
    return TransferOffer(
        reserve.transfer_id,
        spec,
        tuple(reserve.token_ids),
        min(reserve.deadline_s, longest_wait_s),
        tuple(_KNOWN_ENCODINGS[name] for name in reserve.encodings if name in _KNOWN_ENCODINGS),
        reserve.cache_salt,
    )
