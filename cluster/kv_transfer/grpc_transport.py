"""KV over gRPC: one bidirectional stream per transfer, raw frames, HTTP/2 flow control as the back-pressure."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import grpc.aio

from cluster.kv_transfer.base import KVSink, PartHeader, Payload, TransferOffer
from cluster.kv_transfer.codec import checksum, decode_frame, encode_frame, pack_header
from cluster.kv_transfer.throttle import Throttle
from cluster.rpc import create_channel, error_from_rpc, reporting_errors
from cluster.wire import kv_pb2
from engine.errors import BatonError, LayoutMismatchError, TransferError
from engine.kv_spec import KVCacheSpec

logger = logging.getLogger(__name__)

_SERVICE = "baton.v1.KVTransfer"
_METHOD = "Transfer"


class GrpcKVTransport:
    """Implements :class:`cluster.kv_transfer.base.KVTransport`. Keeps one channel per peer.

    Args:
        throttle: cap on this sender's bandwidth, or None.
        timeout_s: of a whole transfer.
    """

    def __init__(self, throttle: Throttle | None = None, timeout_s: float = 120.0) -> None:
        self._throttle = throttle
        self._timeout_s = timeout_s
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def open(self, offer: TransferOffer, peer: str) -> GrpcSendStream:
        channel = self._channels.get(peer)
        if channel is None:
            channel = self._channels[peer] = create_channel(peer)
        method = channel.stream_stream(f"/{_SERVICE}/{_METHOD}")
        stream = GrpcSendStream(method(timeout=self._timeout_s), peer, self._throttle)
        try:
            await stream.reserve(offer)
        except BaseException:
            await stream.abort()
            raise
        return stream

    async def close(self) -> None:
        channels, self._channels = list(self._channels.values()), {}
        await asyncio.gather(*(channel.close() for channel in channels))


class GrpcSendStream:
    """Implements :class:`cluster.kv_transfer.base.KVSendStream`."""

    def __init__(self, call: Any, peer: str, throttle: Throttle | None) -> None:
        self._call = call
        self._peer = peer
        self._throttle = throttle
        self._num_cached_tokens = 0
        self._num_parts = 0
        self._num_bytes = 0

    @property
    def num_cached_tokens(self) -> int:
        return self._num_cached_tokens

    async def reserve(self, offer: TransferOffer) -> None:
        request = kv_pb2.KVReserve(
            transfer_id=offer.transfer_id,
            request_id=offer.request_id,
            spec_json=offer.spec.to_json(),
            spec_fingerprint=offer.spec.fingerprint(),
            token_ids=offer.token_ids,
            deadline_s=offer.deadline_s,
        )
        await self._write(encode_frame(kv_pb2.KVFrame(reserve=request)))
        reply = await self._read()
        self._num_cached_tokens = reply.reserved.num_cached_tokens

    async def send(self, header: PartHeader, payload: Payload) -> None:
        if self._throttle is not None:
            await self._throttle.take(len(payload))
        head = pack_header(
            header.token_start, header.token_count, header.layer_start, header.layer_end, checksum(payload)
        )
        await self._write(encode_frame(head, payload))
        self._num_parts += 1
        self._num_bytes += len(payload)

    async def commit(self) -> int:
        commit = kv_pb2.KVCommit(num_parts=self._num_parts, num_bytes=self._num_bytes)
        await self._write(encode_frame(kv_pb2.KVFrame(commit=commit)))
        reply = await self._read()
        await self._call.done_writing()
        return int(reply.committed.num_bytes)

    async def abort(self) -> None:
        self._call.cancel()

    async def _write(self, data: bytes) -> None:
        try:
            await self._call.write(data)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise await self._failure(error) from error

    async def _read(self) -> kv_pb2.KVReply:
        try:
            data = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, self._peer) from error
        if data is grpc.aio.EOF:
            raise await self._failure(None)
        return kv_pb2.KVReply.FromString(data)

    async def _failure(self, error: Exception | None) -> BatonError:
        """Why the stream ended: what the receiver said, if it said anything."""
        if isinstance(error, grpc.aio.AioRpcError):
            return error_from_rpc(error, self._peer)
        try:
            await self._call.wait_for_connection()
            status = await self._call.code()
            details = await self._call.details()
            metadata = await self._call.trailing_metadata()
        except grpc.aio.AioRpcError as rpc_error:
            return error_from_rpc(rpc_error, self._peer)
        return error_from_rpc(grpc.aio.AioRpcError(status, grpc.aio.Metadata(), metadata, details=details), self._peer)


class KVTransferService:
    """The receiving end: feeds a :class:`KVSink` from the stream, and gives everything back if the stream breaks."""

    def __init__(self, sink: KVSink) -> None:
        self._sink = sink

    def add_to(self, server: grpc.aio.Server) -> None:
        # No (de)serializers: frames stay raw bytes, see codec.py.
        handler = grpc.stream_stream_rpc_method_handler(self._transfer)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: handler}),))

    async def _transfer(
        self, frames: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[bytes]:
        async with reporting_errors(context, lambda error: logger.exception("a KV transfer failed")):
            async for reply in self._replies(frames):
                yield reply.SerializeToString()

    async def _replies(self, frames: AsyncIterator[bytes]) -> AsyncIterator[kv_pb2.KVReply]:
        offer: TransferOffer | None = None
        committed = False
        reason = "the sender went away"
        num_parts = 0
        try:
            async for data in frames:
                header, payload = decode_frame(data)
                kind = header.WhichOneof("kind")
                if kind == "reserve" and offer is None:
                    offer = _offer_of(header.reserve)
                    cached = await self._sink.reserve(offer)
                    yield kv_pb2.KVReply(reserved=kv_pb2.KVReserved(num_cached_tokens=cached))
                elif kind == "part" and offer is not None and not committed:
                    await self._sink.write(offer.transfer_id, _part_of(header.part), payload, header.part.checksum)
                    num_parts += 1
                elif kind == "commit" and offer is not None and not committed:
                    if header.commit.num_parts != num_parts:
                        raise TransferError(f"{header.commit.num_parts} KV parts were sent, {num_parts} arrived.")
                    num_bytes = await self._sink.commit(offer.transfer_id)
                    committed = True
                    yield kv_pb2.KVReply(committed=kv_pb2.KVCommitted(num_bytes=num_bytes))
                else:
                    raise TransferError(f"a KV frame of kind {kind} came out of order.")
        except BatonError as error:
            reason = error.message
            raise
        finally:
            if offer is not None and not committed:
                self._sink.abort(offer.transfer_id, reason)


def _offer_of(reserve: kv_pb2.KVReserve) -> TransferOffer:
    try:
        spec = KVCacheSpec.from_json(reserve.spec_json)
    except (ValueError, TypeError, KeyError) as error:
        raise LayoutMismatchError(f"the sender's KV layout cannot be read: {error}") from error
    if spec.fingerprint() != reserve.spec_fingerprint:
        raise LayoutMismatchError("the sender's KV layout does not match its own fingerprint.")
    token_ids: Sequence[int] = reserve.token_ids
    return TransferOffer(reserve.transfer_id, reserve.request_id, spec, tuple(token_ids), reserve.deadline_s)


def _part_of(part: kv_pb2.KVPart) -> PartHeader:
    return PartHeader(part.token_start, part.token_count, part.layer_start, part.layer_end)
