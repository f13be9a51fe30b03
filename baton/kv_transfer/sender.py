"""KV over gRPC, the sending end: one bidirectional stream per transfer, raw frames, acknowledged part by part. To a
receiver on this host, parts may go as the places where they are in memory that both see; to others, through TCP
connections beside the stream.

A transfer lasts as long as its prompt is being computed, so it has no deadline as a whole. What has a limit is every
wait for the receiver: for its answer to the reservation, for room on the way, for its answer to the commit.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from baton.core.errors import BatonError, TransferError, WorkerLostError, rebuild_error
from baton.core.kv_spec import KVEncoding
from baton.core.logs import RequestLog
from baton.core.request_ids import request_id_of_call
from baton.kv_transfer.base import PartBuffer, PartHeader, Payload, Pieces, Reservation, TransferOffer
from baton.kv_transfer.codec import checksum, encode_frame, encode_head, encoding_name, encoding_of, pack_header
from baton.kv_transfer.payload.data_connection import SocketOption, connect
from baton.kv_transfer.payload.local_memory import LocalMemory, SlotsInFlight
from baton.kv_transfer.payload.raw_socket import ByteStream
from baton.kv_transfer.payload.shared_segment import Slot
from baton.kv_transfer.peer_channels import RETRY_S, PeerChannel, PeerChannels
from baton.kv_transfer.throttle import Throttle
from baton.rpc.channel import as_baton_error, error_from_rpc
from baton.rpc.wire import kv_pb2

logger = logging.getLogger(__name__)

SERVICE = "baton.v1.KVTransfer"
METHOD = "Transfer"
MAX_INFLIGHT_BYTES = 8 * 1024 * 1024
"""HTTP/2 alone would let a slow receiver collect some 20 MB per transfer, since gRPC widens its windows by itself."""
BYTES_PER_CONNECTION = 32 * 1024 * 1024
"""Of a transfer that may have several, counted as it is in the cache. Each costs a round trip at the start."""

_LAST_WORD_S = 2.0


class GrpcKVTransport:
    """Implements :class:`baton.kv_transfer.base.KVTransport`. Streams to one peer share a channel.

    Args:
        throttle: cap on this sender's bandwidth, or None.
        timeout_s: how long a receiver may keep a transfer waiting. For room it may take the offer's deadline besides.
        memory: what receivers on this host may read parts from, or None; closed with the transport.
        max_inflight_bytes: unacknowledged payload of one transfer, for each of its connections; a larger part travels
            alone.
        connections: how many of a transfer's own its payloads may travel through, if it is large enough; 0: none, they
            travel in messages.
        bytes_per_connection: of a transfer that has more than one.
        options: set for every such connection.
    """

    def __init__(
        self,
        throttle: Throttle | None = None,
        timeout_s: float = 120.0,
        memory: LocalMemory | None = None,
        max_inflight_bytes: int = MAX_INFLIGHT_BYTES,
        *,
        connections: int = 0,
        bytes_per_connection: int = BYTES_PER_CONNECTION,
        options: Sequence[SocketOption] = (),
    ) -> None:
        self._throttle = throttle
        self._timeout_s = timeout_s
        self._memory = memory
        self._max_inflight_bytes = max_inflight_bytes
        self._connections = connections
        self._bytes_per_connection = bytes_per_connection
        self._options = options
        self._channels = PeerChannels()

    async def open(self, offer: TransferOffer, peer: str) -> GrpcSendStream:
        entry = self._channels.take(peer)
        call = entry.channel.stream_stream(f"/{SERVICE}/{METHOD}")()
        call.add_done_callback(lambda _: self._channels.give_back(entry))
        slots = SlotsInFlight(self._memory.segment() if self._memory is not None else None)
        stream = GrpcSendStream(call, peer, self._throttle, self._timeout_s, self._max_inflight_bytes, slots, entry)
        try:
            await stream.reserve(offer, connects=self._connections > 0 and entry.may_connect)
            await stream.connect(self._count(offer, stream.reservation), self._options)
        except BaseException as error:
            await stream.abort()
            if isinstance(error, WorkerLostError):
                self._channels.retire(entry)  # other transfers on it may still be well
            raise
        if slots.is_offered and not slots.accepted and not entry.is_known_remote:
            entry.is_known_remote = True
            logger.info("the worker at %s does not read this one's memory", peer)
        return stream

    def _count(self, offer: TransferOffer, reservation: Reservation) -> int:
        num_bytes = (len(offer.token_ids) - reservation.num_cached_tokens) * offer.spec.bytes_per_token
        return max(1, min(self._connections, num_bytes // self._bytes_per_connection))

    async def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
        await self._channels.close()


class GrpcSendStream:
    """Implements :class:`baton.kv_transfer.base.KVSendStream`.

    Replies are read all the time, because they say why a transfer ended: the status of a call that ends during a write
    is lost (grpc/grpc issue 36066).
    """

    def __init__(
        self,
        call: Any,
        peer: str,
        throttle: Throttle | None,
        timeout_s: float,
        max_inflight_bytes: int,
        slots: SlotsInFlight,
        entry: PeerChannel,
    ) -> None:
        self._call = call
        self._entry = entry
        self._peer = peer
        self._throttle = throttle
        self._timeout_s = timeout_s
        self._max_inflight_bytes = max_inflight_bytes
        self._slots = slots
        self._offered_connection: kv_pb2.KVConnection | None = None
        self._connection: ByteStream | None = None
        self._transfer_id = ""
        self._offered: tuple[KVEncoding, ...] = ()
        self._reservation: Reservation | None = None
        self._num_parts = 0
        self._num_bytes = 0
        self._num_bytes_received = 0
        self._num_bytes_committed: int | None = None
        self.on_acknowledged: Callable[[int], None] | None = None
        self._error: BatonError | None = None
        self._changed = asyncio.Event()
        self._reader = asyncio.create_task(self._read_replies())

    @property
    def reservation(self) -> Reservation:
        return self._reservation or Reservation(0)

    @property
    def num_inflight_bytes(self) -> int:
        """Payload on its way: sent, and not yet acknowledged."""
        return self._num_bytes - self._num_bytes_received

    async def reserve(self, offer: TransferOffer, *, connects: bool) -> None:
        """Asks for room and waits for the answer."""
        self._transfer_id, self._offered = offer.transfer_id, offer.encodings
        request = kv_pb2.KVReserve(
            transfer_id=offer.transfer_id,
            request_id=offer.request_id,
            spec_json=offer.spec.to_json(),
            spec_fingerprint=offer.spec.fingerprint(),
            token_ids=offer.token_ids,
            deadline_s=offer.deadline_s,
            segment=self._slots.offer,
            encodings=map(encoding_name, offer.encodings),
            connects=connects,
        )
        await self._write(encode_frame(kv_pb2.KVFrame(reserve=request)))
        await self._until(lambda: self._reservation is not None, offer.deadline_s + self._timeout_s)

    async def connect(self, count: int, options: Sequence[SocketOption]) -> None:
        """Opens so many connections, if the receiver waits for them and is in reach."""
        offered = self._offered_connection
        if offered is None or not offered.most:
            return
        count = min(count, offered.most)
        try:
            self._connection = await connect(self._peer, offered, count, options=options)
        except OSError as error:
            self._avoid_connections(error)
        else:
            self._max_inflight_bytes *= count

    def _avoid_connections(self, error: OSError) -> None:
        self._entry.avoid_connections()
        logger.warning(
            "the worker at %s cannot be reached beside gRPC, KV goes to it in messages for %.0f s, which takes more of "
            "both processors (kv_transfer.connections): %s %s",
            self._peer,
            RETRY_S,
            type(error).__name__,
            error,
        )

    def buffer(self, num_bytes: int) -> Slot | None:
        return self._slots.take(num_bytes)

    async def send(self, header: PartHeader, payload: Payload | Pieces | PartBuffer) -> None:
        if isinstance(payload, Payload | Pieces):
            await self._send(header, payload)
        elif isinstance(payload, Slot):
            self._slots.sending(payload, self._num_bytes + len(payload))
            try:
                await self._send(header, payload.view, payload)
            except BaseException:
                payload.release()
                raise
        else:
            raise TransferError("a KV part came in a buffer of another transport.")

    async def _send(self, header: PartHeader, payload: Payload | Pieces, slot: Slot | None = None) -> None:
        await self._until(
            lambda: not self.num_inflight_bytes or self.num_inflight_bytes + len(payload) <= self._max_inflight_bytes,
            self._timeout_s,
        )
        if self._throttle is not None:
            await self._throttle.take(len(payload))
        connection = self._connection if slot is None and len(payload) else None
        digest = None if slot is None else slot.checksum
        head = pack_header(
            header.token_start,
            header.token_count,
            header.layer_start,
            header.layer_end,
            checksum(payload) if digest is None else digest,
            None if slot is None else slot.reference,
            header.encoding,
            0 if connection is None else len(payload),
        )
        self._num_parts += 1
        self._num_bytes += len(payload)
        if connection is not None:
            await self._stream(connection, encode_head(head.part), payload)
        else:
            await self._write(encode_frame(head, payload if slot is None else b""))

    async def commit(self, draft_state: bytes | None = None) -> int:
        commit = kv_pb2.KVCommit(num_parts=self._num_parts, num_bytes=self._num_bytes, draft_state=draft_state)
        await self._write(encode_frame(kv_pb2.KVFrame(commit=commit)))
        await self._until(lambda: self._num_bytes_committed is not None, self._timeout_s)
        return self._num_bytes_committed or 0

    async def abort(self) -> None:
        self._call.cancel()  # does nothing to a call that is over
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        self._slots.release_all()
        if self._connection is not None:
            self._connection.close()

    async def _until(self, condition: Callable[[], bool], limit_s: float) -> None:
        """Waits for replies that make it true; raises ``TransferError`` when for ``limit_s`` there was none at all."""
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
            async with asyncio.timeout(self._timeout_s):  # who reads nothing stops it
                await self._write_out(data)
        except TimeoutError:
            raise self._stalled(self._timeout_s) from None

    async def _write_out(self, data: bytes) -> None:
        if self._error is not None:
            raise self._error
        try:
            await self._call.write(data)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise await self._last_word() from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise await self._last_word() from error  # not we were cancelled, but the call, with its channel

    async def _stream(self, connection: ByteStream, head: bytes, payload: Payload | Pieces) -> None:
        views = payload.views if isinstance(payload, Pieces) else (memoryview(payload),)
        try:
            async with asyncio.timeout(self._timeout_s):  # as in _write
                await connection.send([memoryview(head), *views])
        except TimeoutError as error:
            self._avoid_connections(error)
            raise self._stalled(self._timeout_s) from None
        except OSError as error:
            broke_by_itself = self._error is None
            word = await self._last_word()
            if self._error is None:  # the stream is well
                word = TransferError(f"the connection for KV to the worker at {self._peer} broke: {error}.")
            if broke_by_itself and type(word) is TransferError:
                self._avoid_connections(error)
            raise word from error

    async def _last_word(self) -> BatonError:
        """Why a write failed, which the reader knows or learns at any moment."""
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
            self._error = TransferError("the transfer was given up by its sender.")
            raise
        except Exception as error:  # noqa: BLE001 - whatever it was, nobody may wait for replies that nobody reads
            RequestLog(logger, request_id_of_call(self._transfer_id)).exception("a transfer failed unexpectedly")
            self._error = as_baton_error(error, self._transfer_id)
        finally:
            self._slots.release_all()
            if self._connection is not None:
                self._connection.close()
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
            raise TransferError(f"the worker at {self._peer} answers in another protocol: {error}") from error

    def _take(self, reply: kv_pb2.KVReply) -> None:
        kind = reply.WhichOneof("kind")
        if kind == "reserved":
            if reply.reserved.takes_segment:
                self._slots.accept()
            if reply.reserved.HasField("connection"):
                self._offered_connection = reply.reserved.connection
            self._reservation = self._reservation_of(reply.reserved)
        elif kind == "received":
            self._received(reply.received.num_bytes)
        elif kind == "committed":
            self._received(reply.committed.num_bytes)  # what was written last is told by this alone
            self._num_bytes_committed = reply.committed.num_bytes
        elif kind == "failed":
            raise rebuild_error(reply.failed.code, reply.failed.message)
        else:
            raise TransferError(f"the worker at {self._peer} answers in another version of the protocol.")

    def _received(self, num_bytes: int) -> None:
        if num_bytes == self._num_bytes_received:  # the commit's answer often tells nothing new
            return
        self._num_bytes_received = num_bytes
        self._slots.acknowledged(num_bytes)
        if self.on_acknowledged is not None:
            self.on_acknowledged(num_bytes)

    def _reservation_of(self, reply: kv_pb2.KVReserved) -> Reservation:
        encoding = encoding_of(reply.encoding)
        if encoding not in (KVEncoding.NATIVE, *self._offered):
            raise TransferError(f"the worker at {self._peer} wants KV as {encoding}, which was not offered.")
        return Reservation(reply.num_cached_tokens, reply.takes_draft, encoding, self._slots.accepted)
