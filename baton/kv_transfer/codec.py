"""The wire format of hand-offs: frames of the gRPC stream, heads in the TCP connections next to it, and checksums.

A frame is a KVFrame, encoded without a protobuf copy of its payload. Protobuf messages may be concatenated field by
field, so a frame is the encoded header followed by the payload's tag, its length and its bytes. The result equals that
of ``KVFrame.SerializeToString``, with two copies fewer.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import xxhash
from google.protobuf.message import DecodeError

from baton.core.errors import TransferError
from baton.core.kv_spec import KVEncoding
from baton.kv_transfer.base import PartHeader, Payload, Pieces
from baton.rpc.wire import kv_pb2

CHUNK_BYTES = 128 * 1024
"""Bytes copied and then summed at a time: few enough for a core's L2 cache, enough to make calls cheap."""

_PAYLOAD_FIELD = 15
_LENGTH_DELIMITED = 2
_PAYLOAD_TAG = bytes([_PAYLOAD_FIELD << 3 | _LENGTH_DELIMITED])
_MAX_VARINT_BYTES = 10

# The protocol of the TCP connections next to the stream; see proto/kv.proto.
HEAD_LENGTH_BYTES = 4
TICKET_BYTES = 16
WELCOME = b"\x01"
"""The receiver's answer to a known ticket."""


def encode_frame(header: kv_pb2.KVFrame, payload: Payload | Pieces = b"") -> bytes:
    """Encodes a frame. ``header`` must not contain a payload."""
    head = header.SerializeToString()
    if not len(payload):
        return head
    pieces = payload.views if isinstance(payload, Pieces) else (payload,)
    return b"".join((head, _PAYLOAD_TAG, _varint(len(payload)), *pieces))


def pack_part(header: PartHeader, digest: int) -> kv_pb2.KVPart:
    """A part's header and checksum in wire format. Payload paths add where the payload is."""
    return kv_pb2.KVPart(
        token_start=header.token_start,
        token_count=header.token_count,
        layer_start=header.layer_start,
        layer_end=header.layer_end,
        checksum=digest,
        encoding=encoding_name(header.encoding),
    )


def encode_part(part: kv_pb2.KVPart, payload: Payload | Pieces = b"") -> bytes:
    """Encodes the frame of a part."""
    return encode_frame(kv_pb2.KVFrame(part=part), payload)


@dataclass(frozen=True, slots=True)
class Introduction:
    """The first bytes of a connection.

    Attributes:
        ticket: identifies the transfer.
        number: number of this connection, from 0.
        count: number of the transfer's connections.
    """

    NUM_BYTES: ClassVar[int] = TICKET_BYTES + 2

    ticket: bytes
    number: int
    count: int

    def encode(self) -> bytes:
        return self.ticket + bytes([self.number, self.count])

    @classmethod
    def decode(cls, data: bytes) -> Introduction:
        """Reads any :attr:`NUM_BYTES` bytes."""
        return cls(data[:TICKET_BYTES], *data[TICKET_BYTES:])


def encode_head(part: kv_pb2.KVPart) -> bytes:
    """Encodes what precedes a payload in a connection: the length of the header, and the header."""
    head = part.SerializeToString()
    return len(head).to_bytes(HEAD_LENGTH_BYTES, "little") + head


def decode_head(data: bytes) -> kv_pb2.KVPart:
    """Decodes a head without its length. Raises :class:`TransferError` when the bytes are not a head."""
    try:
        return kv_pb2.KVPart.FromString(data)
    except DecodeError as error:
        raise TransferError(f"a KV part's header cannot be parsed: {error}") from error


def decode_frame(data: bytes) -> tuple[kv_pb2.KVFrame, memoryview]:
    """Decodes a frame into header and payload; the payload is a view into ``data``.

    Raises:
        TransferError: the bytes are not a KVFrame, or hold fields that this version does not know.
    """
    view = memoryview(data)
    payload = view[:0]
    head_end = len(view)
    position = 0
    while position < len(view):
        start = position
        tag, position = _read_varint(view, position)
        if tag & 7 != _LENGTH_DELIMITED:
            raise TransferError(f"a KV frame has a field of wire type {tag & 7}; the sender uses a different protocol.")
        length, position = _read_varint(view, position)
        if position + length > len(view):
            raise TransferError(f"a KV frame ends {position + length - len(view)} bytes too early.")
        if tag >> 3 == _PAYLOAD_FIELD:
            if position + length != len(view):
                raise TransferError("a KV frame has fields after its payload; the sender uses a different protocol.")
            payload, head_end = view[position:], start
        position += length
    header = kv_pb2.KVFrame()
    try:
        header.ParseFromString(bytes(view[:head_end]))
    except Exception as error:
        raise TransferError(f"a KV frame cannot be parsed: {error}") from error
    return header, payload


def encoding_name(encoding: KVEncoding) -> str:
    """The wire name of an encoding; the empty string means native."""
    return "" if encoding is KVEncoding.NATIVE else encoding.value


def encoding_of(name: str) -> KVEncoding:
    """The reverse of :func:`encoding_name`. Raises :class:`TransferError` for names that this version does not know."""
    try:
        return KVEncoding(name or KVEncoding.NATIVE)
    except ValueError:
        raise TransferError(f"KV is encoded as {name[:40]!r}, which this worker does not support.") from None


def checksum(payload: Payload | Pieces) -> int:
    """xxh3-64 of the payload."""
    if not isinstance(payload, Pieces):
        return xxhash.xxh3_64_intdigest(payload)
    digest = xxhash.xxh3_64()
    for view in payload.views:
        digest.update(view)
    return digest.intdigest()


def copy_summed(sources: Sequence[memoryview], targets: Sequence[memoryview]) -> int:
    """Copies bytes between lists of views, which may be split differently, and computes the checksum of the copy.

    Returns:
        The xxh3-64 of the bytes in ``targets``, even if another process writes to ``sources`` during the copy.

    Raises:
        ValueError: sources and targets differ in length.
    """
    num_bytes, room = sum(map(len, sources)), sum(map(len, targets))
    if num_bytes != room:
        raise ValueError(f"cannot copy {num_bytes} bytes into a buffer of {room} bytes")
    digest = xxhash.xxh3_64()
    for source, target in _pairs(sources, targets):
        target[:] = source
        digest.update(target)
    return digest.intdigest()


def _pairs(sources: Sequence[memoryview], targets: Sequence[memoryview]) -> Iterator[tuple[memoryview, memoryview]]:
    """Yields pairs of equally long chunks that cross no boundary of either side."""
    left = iter(targets)
    target, used = memoryview(b""), 0
    for source in sources:
        done = 0
        while done < len(source):
            if used == len(target):
                target, used = next(left), 0
                continue
            size = min(CHUNK_BYTES, len(source) - done, len(target) - used)
            yield source[done : done + size], target[used : used + size]
            done += size
            used += size


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(view: memoryview, position: int) -> tuple[int, int]:
    value = shift = 0
    for index in range(position, min(len(view), position + _MAX_VARINT_BYTES)):
        byte = view[index]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value > sys.maxsize:
                break
            return value, index + 1
        shift += 7
    raise TransferError("a KV frame contains a number that is truncated or too large.")
