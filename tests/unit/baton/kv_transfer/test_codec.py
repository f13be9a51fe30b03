"""Frames are ordinary protobuf, and any other input raises a typed error."""

from __future__ import annotations

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import TransferError
from baton.core.kv_spec import KVEncoding
from baton.kv_transfer.base import PartHeader
from baton.kv_transfer.codec import (
    checksum,
    decode_frame,
    encode_frame,
    encode_part,
    encoding_name,
    encoding_of,
    pack_part,
)
from baton.rpc.wire.kv_pb2 import KVCommit, KVFrame, KVReserve

uint32 = st.integers(0, 2**32 - 1)
uint64 = st.integers(0, 2**64 - 1)
headers = st.one_of(
    st.builds(
        lambda header, digest: KVFrame(part=pack_part(header, digest)),
        st.builds(PartHeader, uint32, uint32, uint32, uint32, st.sampled_from(KVEncoding)),
        uint64,
    ),
    st.builds(lambda parts, size: KVFrame(commit=KVCommit(num_parts=parts, num_bytes=size)), uint32, uint64),
    st.builds(
        lambda name, spec, tokens, deadline: KVFrame(
            reserve=KVReserve(transfer_id=name, spec_json=spec, token_ids=tokens, deadline_s=deadline)
        ),
        st.text(),
        st.text(),
        st.lists(uint32),
        st.floats(allow_nan=False),
    ),
)


@given(headers, st.binary(max_size=40_000))
def test_a_frame_round_trips(header: KVFrame, payload: bytes) -> None:
    decoded, view = decode_frame(encode_frame(header, payload))
    assert decoded == header
    assert bytes(view) == payload


@given(headers, st.binary(max_size=40_000))
def test_a_frame_matches_protobuf_encoding(header: KVFrame, payload: bytes) -> None:
    whole = KVFrame()
    whole.CopyFrom(header)
    whole.payload = payload
    data = encode_frame(header, payload)
    assert data == whole.SerializeToString()
    assert KVFrame.FromString(data) == whole


@pytest.mark.parametrize("encoding", KVEncoding)
def test_names_of_encodings_round_trip_and_native_has_none(encoding: KVEncoding) -> None:
    name = encoding_name(encoding)
    assert encoding_of(name) is encoding
    assert (name == "") == (encoding is KVEncoding.NATIVE)
    with pytest.raises(TransferError, match="encoded as 'int3'"):
        encoding_of("int3")


@pytest.mark.parametrize("length", [0, 1, 127, 128, 16_383, 16_384, 2_097_151, 2_097_152])
def test_payload_lengths_around_varint_boundaries_round_trip(length: int) -> None:
    part = pack_part(PartHeader(1, 2, 3, 4), 5)
    whole = KVFrame(part=part, payload=bytes(length))
    data = encode_part(part, bytearray(length))
    assert data == whole.SerializeToString()
    assert len(decode_frame(data)[1]) == length


def test_the_payload_is_not_copied_out_of_the_frame() -> None:
    data = encode_part(pack_part(PartHeader(1, 2, 3, 4), 5), b"payload")
    _, view = decode_frame(data)
    assert view.obj is data


@given(st.binary(max_size=300))
def test_garbage_is_a_transfer_error(data: bytes) -> None:
    _decode_or_refuse(data)


@given(headers, st.binary(max_size=200), st.data())
def test_damaged_frames_are_refused_or_read_as_protobuf_reads_them(
    header: KVFrame, payload: bytes, data: st.DataObject
) -> None:
    frame = bytearray(encode_frame(header, payload))
    for _ in range(data.draw(st.integers(1, 3))):
        if not frame:
            break
        position = data.draw(st.integers(0, len(frame) - 1))
        if data.draw(st.booleans()):
            frame[position] = data.draw(st.integers(0, 255))
        else:
            del frame[position:]
    _decode_or_refuse(bytes(frame))


def _decode_or_refuse(data: bytes) -> None:
    try:
        header, payload = decode_frame(data)
    except TransferError:
        return
    header.payload = bytes(payload)
    assert KVFrame.FromString(data).SerializeToString() == header.SerializeToString()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\x08\x01", "wire type 0"),
        (b"\x7a\x05abc", "2 bytes too early"),
        (b"\x7a\x01a\x12\x00", "after its payload"),
        (b"\x80", "truncated"),
        (b"\xff" * 11, "too large"),
        (b"\x12\x02\xff\xff", "cannot be parsed"),
    ],
)
def test_errors_name_what_is_wrong(data: bytes, reason: str) -> None:
    with pytest.raises(TransferError, match=reason):
        decode_frame(data)


@given(st.binary(max_size=1000))
def test_the_checksum_is_xxh3_for_every_buffer(payload: bytes) -> None:
    expected = xxhash.xxh3_64_intdigest(payload)
    assert checksum(payload) == checksum(bytearray(payload)) == checksum(memoryview(payload)) == expected
