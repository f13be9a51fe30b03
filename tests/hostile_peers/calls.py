"""Strategies for hostile calls: of every method, with every payload path of hand-offs, and bytes that are no gRPC."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from google.protobuf.message import Message
from hypothesis import strategies as st

from baton.core.request import SamplingParams
from baton.kv_transfer.codec import TICKET_BYTES, checksum, encode_frame, encode_head, encode_part
from baton.kv_transfer.payload.segment import SharedSegment
from baton.rpc.conversions import pack_sequence
from baton.rpc.wire import kv_pb2, worker_pb2
from tests.credentials import send_to
from tests.hostile_peers.mutations import changed, damaged
from tests.hostile_peers.recording import Part, RecordedTransfer

T = TypeVar("T")
Worker = Literal["prefill", "decode"]
Token = Literal["right", "wrong", "none"]
TRANSFER = "/baton.v1.KVTransfer/Transfer"
_NUM_OUTPUT_TOKENS = 3
_SLOT_BYTES = 4096
_HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
_MOMENTS = st.sampled_from([*[None] * 9, 0.0, 0.002, 0.02])


@dataclass(frozen=True, slots=True)
class Connection:
    """A connection to the port for KV. ``ticket`` is ``None`` for the transfer's own ticket."""

    ticket: bytes | None
    data: bytes


@dataclass(frozen=True, slots=True)
class Call:
    """A gRPC call.

    Attributes:
        messages: encoded requests.
        cancel_after_s: when the caller cancels it; ``None`` means never.
        connections: opened when the answer to a reservation offers a port.
        script: replies of the hostile receiver to the hand-off that this call asks for, by transfer id.
    """

    method: str
    worker: Worker
    messages: Sequence[bytes] = field(repr=False)
    token: Token = "right"
    cancel_after_s: float | None = None
    connections: Sequence[Connection] = field(default=(), repr=False)
    script: tuple[str, Sequence[bytes]] | None = field(default=None, repr=False)

    @property
    def num_messages(self) -> int:
        return max(1, len(self.messages) + len(self.connections) + (len(self.script[1]) if self.script else 0))


@dataclass(frozen=True, slots=True)
class RawBytes:
    """Bytes sent to one of the workers' ports, by its position among them."""

    port: int
    data: bytes
    num_messages: int = 1


HostileCall = Call | RawBytes


@dataclass(frozen=True, slots=True)
class Material:
    """What mutations begin with.

    Attributes:
        transfers: real transfers, with the layers of the draft.
        segment: memory of the hostile peer, in which every part of the transfers has a slot.
        slots: these slots, by the checksum of their part.
        receiver: address of the hostile receiver.
        decode: address of the decode worker.
    """

    transfers: Sequence[RecordedTransfer]
    segment: SharedSegment
    slots: Mapping[int, kv_pb2.KVSlot]
    receiver: str
    decode: str

    @classmethod
    def of(cls, transfers: Sequence[RecordedTransfer], receiver: str, decode: str) -> Material:
        segment = SharedSegment(_SLOT_BYTES)
        slots: dict[int, kv_pb2.KVSlot] = {}
        for header, payload in (part for transfer in transfers for part in transfer.parts):
            slot = segment.take(len(payload))
            assert slot is not None
            slot.view[:] = payload
            slots[header.checksum] = slot.reference
        return cls(transfers, segment, slots, receiver, decode)


def hostile_calls(material: Material, ids: Sequence[str]) -> st.SearchStrategy[HostileCall]:
    """Calls that share the given transfer ids, so that they meet each other's transfers."""
    some_id = st.sampled_from(ids)
    return st.one_of(
        _transfers(material, some_id),
        _transfers(material, some_id),
        _generate(material, some_id),
        _prefill(material, some_id),
        _prefill(material, some_id, is_received=True),
        _plain_calls(some_id),
        _raw_bytes(),
    )


@st.composite
def _encoded(draw: st.DrawFn, message: Message) -> bytes:
    data: bytes = draw(changed(message)).SerializeToString()
    return draw(_rarely(damaged(data), data))


@st.composite
def _rarely(draw: st.DrawFn, odd: st.SearchStrategy[T], right: T) -> T:
    return draw(odd) if draw(st.integers(0, 7)) == 5 else right


@st.composite
def _very_rarely(draw: st.DrawFn, odd: st.SearchStrategy[T], right: T) -> T:
    """For what is repeated in a transfer."""
    return draw(odd) if draw(st.integers(0, 60)) == 7 else right


_TOKENS: st.SearchStrategy[Token] = st.sampled_from(["right"] * 8 + ["wrong", "none"])  # type: ignore[arg-type]


@st.composite
def _plain_calls(draw: st.DrawFn, ids: st.SearchStrategy[str]) -> Call:
    method, message = draw(
        st.sampled_from(
            [
                ("Worker/Ping", worker_pb2.PingRequest()),
                ("Worker/Probe", worker_pb2.ProbeRequest()),
                ("Worker/GetStats", worker_pb2.StatsRequest()),
                ("Worker/WatchCache", worker_pb2.WatchCacheRequest()),
                ("Worker/WatchBookings", worker_pb2.WatchBookingsRequest(router=draw(ids))),
                ("Decode/Abandon", worker_pb2.AbandonRequest(transfer_id=draw(ids))),
                ("Worker/Stop", worker_pb2.PingRequest()),
                ("", worker_pb2.PingRequest()),
            ]
        )
    )
    messages = draw(st.lists(_encoded(message) | st.binary(max_size=20), max_size=2))
    after_s = 0.02 if method.startswith("Worker/Watch") or not messages else draw(_MOMENTS)
    return Call(f"/baton.v1.{method}", draw(st.sampled_from(["prefill", "decode"])), messages, draw(_TOKENS), after_s)


def _sequence(transfer: RecordedTransfer, call_id: str, salt: str, num_output: int) -> worker_pb2.Sequence:
    params = SamplingParams(max_tokens=_NUM_OUTPUT_TOKENS, temperature=0)
    return pack_sequence(call_id, transfer.reserve.token_ids, params, [5] * num_output, cache_salt=salt)


@st.composite
def _generate(draw: st.DrawFn, material: Material, ids: st.SearchStrategy[str]) -> Call:
    transfer, transfer_id = draw(st.sampled_from(material.transfers)), draw(ids)
    sequence = _sequence(transfer, transfer_id, draw(st.sampled_from(["", transfer_id])), draw(st.integers(0, 1)))
    message = worker_pb2.GenerateRequest(sequence=sequence, transfer_id=draw(st.sampled_from([transfer_id, ""])))
    return Call("/baton.v1.Decode/Generate", "decode", [draw(_encoded(message))], draw(_TOKENS), draw(_MOMENTS))


@st.composite
def _prefill(draw: st.DrawFn, material: Material, ids: st.SearchStrategy[str], *, is_received: bool = False) -> Call:
    transfer, transfer_id = draw(st.sampled_from(material.transfers)), draw(ids)
    message = worker_pb2.PrefillRequest(sequence=_sequence(transfer, transfer_id, transfer_id, 0))
    script: tuple[str, Sequence[bytes]] | None = None
    if is_received:
        transfer_id += "/received"
        script = transfer_id, draw(_replies(transfer))
    if is_received or draw(st.booleans()):
        message.handoff.transfer_id = transfer_id
        send_to(message.handoff, material.receiver if is_received else material.decode)
    data = message.SerializeToString() if is_received else draw(_encoded(message))
    return Call("/baton.v1.Prefill/Prefill", "prefill", [data], draw(_TOKENS), draw(_MOMENTS), script=script)


@st.composite
def _replies(draw: st.DrawFn, transfer: RecordedTransfer) -> list[bytes]:
    right = [
        kv_pb2.KVReply(reserved=kv_pb2.KVReserved(takes_draft=True)),
        kv_pb2.KVReply(received=kv_pb2.KVReceived(num_bytes=transfer.commit.num_bytes)),
        kv_pb2.KVReply(committed=kv_pb2.KVCommitted(num_bytes=transfer.commit.num_bytes)),
        kv_pb2.KVReply(failed=kv_pb2.KVFailed(code="kv_transfer_failed", message="no")),
    ]
    chosen = [right[0], *draw(st.lists(st.sampled_from(right), max_size=3))][draw(st.integers(0, 1)) :]
    return [draw(_encoded(reply)) for reply in chosen]


@st.composite
def _transfers(draw: st.DrawFn, material: Material, ids: st.SearchStrategy[str]) -> Call:
    transfer, transfer_id = draw(st.sampled_from(material.transfers)), draw(ids)
    way = draw(st.sampled_from(["messages", "slots", "connections"]))
    reserve = kv_pb2.KVReserve()
    reserve.CopyFrom(transfer.reserve)
    reserve.transfer_id, reserve.cache_salt = transfer_id, draw(st.sampled_from(["", *[transfer_id] * 5]))
    reserve.connects = way == "connections"
    if way == "slots":
        reserve.segment.CopyFrom(material.segment.offer)
    else:
        reserve.ClearField("segment")
    first = encode_frame(kv_pb2.KVFrame(reserve=draw(_rarely(changed(reserve), reserve))))
    parts = draw(_rarely(_rearranged(transfer.parts), transfer.parts))
    commits = draw(_rarely(st.lists(changed(transfer.commit), max_size=2), [transfer.commit]))
    last = [encode_frame(kv_pb2.KVFrame(commit=commit)) for commit in commits]
    if way == "connections":
        stream = b"".join(_with_length(draw(_part(part))) for part in parts)
        frames, connections = [first, *last], draw(_connections(stream))
    else:
        frames = [first, *(draw(_part_frame(material, part, way)) for part in parts), *last]
        connections = []
    frames = draw(_rarely(_shuffled(frames), frames))
    return Call(TRANSFER, "decode", frames, draw(_TOKENS), draw(_MOMENTS), connections)


def _with_length(part: Part) -> bytes:
    header, payload = part
    if not header.num_bytes:
        header.num_bytes = len(payload)
    return encode_head(header) + bytes(payload)


@st.composite
def _part(draw: st.DrawFn, part: Part) -> Part:
    header = kv_pb2.KVPart()
    header.CopyFrom(part[0])
    payload = draw(_very_rarely(damaged(bytes(part[1])), part[1]))
    if payload is not part[1]:
        header.checksum = checksum(payload)
    return draw(_very_rarely(changed(header), header)), payload


@st.composite
def _part_frame(draw: st.DrawFn, material: Material, part: Part, way: str) -> bytes:
    slot = material.slots[part[0].checksum]
    header, payload = draw(_part(part))
    if way == "slots":
        header.slot.CopyFrom(draw(_very_rarely(changed(slot), slot)))
    return encode_part(header, payload if way == "messages" or draw(_very_rarely(st.just(True), False)) else b"")


@st.composite
def _rearranged(draw: st.DrawFn, parts: Sequence[Part]) -> list[Part]:
    """One part is left out, repeated or too early."""
    found, place = list(parts), draw(st.integers(0, len(parts) - 1))
    match draw(st.sampled_from(["drop", "repeat", "swap"])):
        case "drop":
            del found[place]
        case "repeat":
            found.insert(place, found[place])
        case "swap":
            found[0], found[place] = found[place], found[0]
    return found


@st.composite
def _shuffled(draw: st.DrawFn, frames: Sequence[bytes]) -> list[bytes]:
    """One frame is damaged or late, or another one is put between them."""
    found, place = list(frames), draw(st.integers(0, len(frames) - 1))
    alive = encode_frame(kv_pb2.KVFrame(alive=kv_pb2.KVAlive()))
    match draw(st.sampled_from(["damage", "move", "alive", "bytes"])):
        case "damage":
            found[place] = draw(damaged(found[place]))
        case "move":
            found.append(found.pop(place))
        case "alive":
            found.insert(place, alive)
        case "bytes":
            found.insert(place, draw(st.binary(max_size=40)))
    return found


@st.composite
def _connections(draw: st.DrawFn, stream: bytes) -> list[Connection]:
    """One connection, which begins with its number and the number of connections, or several odd ones."""
    if draw(st.integers(0, 3)):
        return [Connection(None, bytes([0, 1]) + draw(_rarely(damaged(stream), stream)))]
    ticket = st.none() | st.binary(max_size=TICKET_BYTES)
    odd = st.builds(Connection, ticket, st.binary(max_size=2) | st.just(bytes([0, 2]) + stream))
    return draw(st.lists(odd, min_size=1, max_size=3))


@st.composite
def _raw_bytes(draw: st.DrawFn) -> RawBytes:
    start = draw(st.sampled_from([b"", _HTTP2, b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/1.1\r\n\r\n"]))
    return RawBytes(draw(st.integers(0, 2)), start + draw(st.binary(max_size=200)))
