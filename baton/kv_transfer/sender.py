"""The sending end of hand-offs: one bidirectional gRPC stream per transfer. Payload paths carry the bytes of parts.

A transfer lasts as long as its prompt is being computed, so it has no deadline as a whole. Each wait for the receiver
has a time limit: for the answer to the reservation, for room in the window, for the answer to the commit.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from baton.core.errors import BatonError, TransferError, WorkerLostError, rebuild_error
from baton.core.kv_spec import KVEncoding
from baton.core.logs import RequestLog
from baton.core.request_ids import request_id_of_call
from baton.kv_transfer.base import PartBuffer, PartHeader, Payload, Pieces, Reservation, TransferOffer
from baton.kv_transfer.codec import checksum, encode_frame, encoding_name, encoding_of, pack_part
from baton.kv_transfer.flow import BuffersInFlight, Throttle
from baton.kv_transfer.payload.base import PartSender, SendPath
from baton.kv_transfer.peer_channels import PeerChannel, PeerChannels
from baton.rpc.channel import as_baton_error, error_from_rpc
from baton.rpc.credentials import PeerCredentials
from baton.rpc.wire import kv_pb2

logger = logging.getLogger(__name__)

SERVICE = "baton.v1.KVTransfer"
METHOD = "Transfer"
ALIVE_EVERY_S = 5.0
"""Receivers wait :data:`baton.kv_transfer.receiver.SILENCE_S` for a sign of life."""
MAX_INFLIGHT_BYTES = 8 * 1024 * 1024
"""With HTTP/2 alone, some 20 MB per transfer could queue for a slow receiver, since gRPC widens its own windows."""

_LAST_WORD_S = 2.0


class GrpcKVTransport:
    """Implements :class:`baton.kv_transfer.base.KVTransport`. Streams to one peer share a channel.

    Args:
        paths: payload paths in order of preference; the last one must carry every transfer. Closed with the transport.
        credentials: those of this worker.
        throttle: cap on this sender's bandwidth; ``None`` means no cap.
        timeout_s: how long a receiver may keep a transfer waiting; for room, in addition to the offer's deadline.
        max_inflight_bytes: limit of a transfer's unacknowledged payload for each of its connections; a larger part is
            sent alone.
    """

    def __init__(
        self,
        paths: Sequence[SendPath],
        credentials: PeerCredentials,
        throttle: Throttle | None = None,
        timeout_s: float = 120.0,
        max_inflight_bytes: int = MAX_INFLIGHT_BYTES,
    ) -> None:
        self._paths = paths
        self._throttle = throttle
        self._timeout_s = timeout_s
        self._max_inflight_bytes = max_inflight_bytes
        self._channels = PeerChannels(credentials)

    async def open(self, offer: TransferOffer, peer: str) -> GrpcSendStream:
        entry = self._channels.take(peer)
        call = entry.channel.stream_stream(f"/{SERVICE}/{METHOD}")(metadata=entry.metadata)
        call.add_done_callback(lambda _: self._channels.give_back(entry))
        stream = GrpcSendStream(call, entry, self._throttle, self._timeout_s, self._max_inflight_bytes)
        try:
            await stream.open(offer, self._paths)
        except BaseException as error:
            await stream.abort()
            if isinstance(error, WorkerLostError):
                self._channels.retire(entry)  # not closed: other transfers on it may still work
            raise
        return stream

    async def close(self) -> None:
        for path in self._paths:
            path.close()
        await self._channels.close()


class GrpcSendStream:
    """Implements :class:`baton.kv_transfer.base.KVSendStream`.

    A task reads replies throughout, because they say why a transfer ended: the status of a call that ends during a
    write is lost (grpc/grpc issue 36066).

    Attributes:
        parts: carries this transfer's parts; set once the receiver has answered.
    """

    def __init__(
        self,
        call: Any,
        entry: PeerChannel,
        throttle: Throttle | None,
        timeout_s: float,
        max_inflight_bytes: int,
    ) -> None:
        self._call = call
        self._entry = entry
        self._peer = entry.peer
        self._throttle = throttle
        self._timeout_s = timeout_s
        self._max_inflight_bytes = max_inflight_bytes
        self._buffers = BuffersInFlight()
        self._transfer_id = ""
        self._reserved: kv_pb2.KVReserved | None = None
        self._reservation = Reservation(0)
        self._num_parts = 0
        self._num_bytes = 0
        self._num_bytes_received = 0
        self._num_bytes_committed: int | None = None
        self.parts: PartSender | None = None
        self.on_acknowledged: Callable[[int], None] | None = None
        self._error: BatonError | None = None
        self._changed = asyncio.Event()
        self._writing = asyncio.Lock()  # gRPC takes one message at a time
        self._reader = asyncio.create_task(self._read_replies())
        self._heart = asyncio.create_task(self._beat())

    @property
    def reservation(self) -> Reservation:
        return self._reservation

    @property
    def num_inflight_bytes(self) -> int:
        """Bytes of payload that were sent and are not yet acknowledged."""
        return self._num_bytes - self._num_bytes_received

    async def open(self, offer: TransferOffer, paths: Sequence[SendPath]) -> None:
        """Asks for room, waits for the answer, and sets up the first of ``paths`` that both ends can use."""
        self._transfer_id = offer.transfer_id
        request = kv_pb2.KVReserve(
            transfer_id=offer.transfer_id,
            spec_json=offer.spec.to_json(),
            spec_fingerprint=offer.spec.fingerprint(),
            token_ids=offer.token_ids,
            deadline_s=offer.deadline_s,
            encodings=map(encoding_name, offer.encodings),
            cache_salt=offer.cache_salt,
        )
        for path in paths:
            path.offer(self._entry, request)
        await self._write(encode_frame(kv_pb2.KVFrame(reserve=request)))
        await self._until(lambda: self._reserved is not None, offer.deadline_s + self._timeout_s)
        reserved = self._reserved or kv_pb2.KVReserved()
        encoding = self._encoding_of(reserved, offer)
        num_bytes = (len(offer.token_ids) - reserved.num_cached_tokens) * offer.spec.bytes_per_token
        self.parts = parts = await self._open_path(paths, reserved, num_bytes)
        self._max_inflight_bytes *= parts.num_connections
        self._reservation = Reservation(reserved.num_cached_tokens, reserved.takes_draft, encoding, parts.shares_memory)

    async def _open_path(self, paths: Sequence[SendPath], reserved: kv_pb2.KVReserved, num_bytes: int) -> PartSender:
        for path in paths:
            parts = await path.open(self._entry, reserved, num_bytes, self._write_out)
            if parts is not None:
                return parts
        raise RuntimeError("no payload path supports the transfer; the last path must support every transfer")

    def buffer(self, num_bytes: int) -> PartBuffer | None:
        return None if self.parts is None else self.parts.buffer(num_bytes)

    async def send(self, header: PartHeader, payload: Payload | Pieces | PartBuffer) -> None:
        if isinstance(payload, Payload | Pieces):
            await self._send(header, payload)
            return
        self._buffers.sending(payload, self._num_bytes + len(payload))
        try:
            await self._send(header, payload)
        except BaseException:
            payload.release()
            raise

    async def _send(self, header: PartHeader, payload: Payload | Pieces | PartBuffer) -> None:
        await self._until(
            lambda: not self.num_inflight_bytes or self.num_inflight_bytes + len(payload) <= self._max_inflight_bytes,
            self._timeout_s,
        )
        if self._throttle is not None:
            await self._throttle.take(len(payload))
        part = pack_part(header, _digest_of(payload))
        self._num_parts += 1
        self._num_bytes += len(payload)
        await self._carry(part, payload)

    async def _carry(self, part: kv_pb2.KVPart, payload: Payload | Pieces | PartBuffer) -> None:
        if self.parts is None:
            raise RuntimeError("parts can only be sent while the stream is open")
        try:
            async with asyncio.timeout(self._timeout_s):  # blocks when the receiver reads nothing
                await self.parts.send(part, payload)
        except TimeoutError as error:
            self.parts.close(error)
            raise self._stalled(self._timeout_s) from None
        except OSError as error:
            broke_by_itself = self._error is None
            word = await self._last_word()
            if self._error is None:  # the stream still works
                word = TransferError(f"the connection for KV to the worker at {self._peer} broke: {error}.")
            if broke_by_itself and type(word) is TransferError:
                self.parts.close(error)
            raise word from error

    async def commit(self, draft_state: bytes | None = None) -> int:
        commit = kv_pb2.KVCommit(num_parts=self._num_parts, num_bytes=self._num_bytes, draft_state=draft_state)
        await self._write(encode_frame(kv_pb2.KVFrame(commit=commit)))
        await self._until(lambda: self._num_bytes_committed is not None, self._timeout_s)
        return self._num_bytes_committed or 0

    async def abort(self) -> None:
        self._call.cancel()  # has no effect on a call that has ended
        self._reader.cancel()
        self._heart.cancel()
        await asyncio.gather(self._reader, self._heart, return_exceptions=True)
        self._end()

    def _end(self) -> None:
        self._heart.cancel()
        self._buffers.release_all()
        if self.parts is not None:
            self.parts.close()

    async def _until(self, condition: Callable[[], bool], limit_s: float) -> None:
        """Waits until replies make ``condition`` true. Raises ``TransferError`` after ``limit_s`` without a reply."""
        while not condition():
            if self._error is not None:
                raise self._error
            self._changed.clear()
            try:
                async with asyncio.timeout(limit_s):
                    await self._changed.wait()
            except TimeoutError:
                raise self._stalled(limit_s) from None

    def _stalled(self, waited_s: float) -> TransferError:
        return TransferError(
            f"the worker at {self._peer} kept the transfer waiting for {waited_s:g} s (kv_transfer.transfer_timeout_s)."
        )

    async def _write(self, data: bytes) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):  # blocks when the receiver reads nothing
                await self._write_out(data)
        except TimeoutError:
            raise self._stalled(self._timeout_s) from None

    async def _write_out(self, data: bytes) -> None:
        if self._error is not None:
            raise self._error
        try:
            async with self._writing:
                await self._call.write(data)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise await self._last_word() from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise await self._last_word() from error  # not this task but the call was cancelled, with its channel

    async def _beat(self) -> None:
        """Shows the receiver that this end lives, until the stream ends."""
        while self._error is None and self._num_bytes_committed is None:
            await asyncio.sleep(ALIVE_EVERY_S)
            if self._reserved is not None:
                with suppress(BatonError):  # whoever uses the stream gets the error
                    await self._write_out(encode_frame(kv_pb2.KVFrame(alive=kv_pb2.KVAlive())))

    async def _last_word(self) -> BatonError:
        """Why a write failed. The reader already knows the reason, or learns it within moments."""
        await asyncio.wait([self._reader], timeout=_LAST_WORD_S)
        return self._error or WorkerLostError(f"the connection to the worker at {self._peer} broke during a transfer.")

    async def _read_replies(self) -> None:
        try:
            while self._num_bytes_committed is None:
                self._take(await self._read())
                self._changed.set()
        except BatonError as error:
            self._error = error
        except asyncio.CancelledError:
            self._error = TransferError("the transfer was cancelled by its sender.")
            raise
        except Exception as error:  # noqa: BLE001 - send and commit wait for replies, so they need every error
            RequestLog(logger, request_id_of_call(self._transfer_id)).exception("a transfer failed unexpectedly")
            self._error = as_baton_error(error, self._transfer_id)
        finally:
            self._end()
            self._changed.set()

    async def _read(self) -> kv_pb2.KVReply:
        try:
            data = await self._call.read()
            if data is grpc.aio.EOF:
                raise TransferError(f"the worker at {self._peer} ended the transfer without acknowledging it.")
            return kv_pb2.KVReply.FromString(data)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, self._peer) from error
        except DecodeError as error:
            raise TransferError(f"the worker at {self._peer} uses a different protocol: {error}") from error

    def _take(self, reply: kv_pb2.KVReply) -> None:
        kind = reply.WhichOneof("kind")
        if kind == "reserved":
            self._reserved = reply.reserved
        elif kind == "received":
            self._received(reply.received.num_bytes)
        elif kind == "committed":
            self._received(reply.committed.num_bytes)  # the last bytes have no other acknowledgement
            self._num_bytes_committed = reply.committed.num_bytes
        elif kind == "failed":
            raise rebuild_error(reply.failed.code, reply.failed.message)
        else:
            raise TransferError(f"the worker at {self._peer} uses a different version of the protocol.")

    def _received(self, num_bytes: int) -> None:
        if num_bytes == self._num_bytes_received:  # often so in the answer to the commit
            return
        self._num_bytes_received = num_bytes
        self._buffers.acknowledged(num_bytes)
        if self.on_acknowledged is not None:
            self.on_acknowledged(num_bytes)

    def _encoding_of(self, reserved: kv_pb2.KVReserved, offer: TransferOffer) -> KVEncoding:
        encoding = encoding_of(reserved.encoding)
        if encoding not in (KVEncoding.NATIVE, *offer.encodings):
            raise TransferError(f"the worker at {self._peer} requests KV as {encoding}, which was not offered.")
        return encoding


def _digest_of(payload: Payload | Pieces | PartBuffer) -> int:
    if isinstance(payload, Payload | Pieces):
        return checksum(payload)
    return checksum(payload.view) if payload.checksum is None else payload.checksum
