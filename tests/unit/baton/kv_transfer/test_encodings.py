"""Both ends agree on how parts are encoded, over every transport; KV is native where one knows or wants no int8."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from baton.core.errors import TransferError
from baton.core.kv_spec import KVEncoding
from baton.engine.runner.model_runner import ModelRunner
from baton.kv_transfer.base import PartHeader, Payload, Reservation, TransferOffer
from baton.kv_transfer.codec import checksum, encode_frame, encode_part, pack_part
from baton.rpc.wire.kv_pb2 import KVFrame, KVPart, KVReserve
from tests.kv_receiver import Receiver, SourceKV, running_receiver
from tests.tiny_models import random_prompts
from tests.unit.baton.kv_transfer.links import TRANSPORTS, Link, RecordingSink, link, send_all, talk

PROMPT = random_prompts((22,))[0]
INT8 = KVEncoding.INT8


@pytest.fixture
async def lossy(receiver_runner: ModelRunner) -> AsyncIterator[Receiver]:
    """Takes int8."""
    async with running_receiver(receiver_runner, encodings=(INT8,)) as running:
        yield running


@pytest.fixture(params=TRANSPORTS)
async def way(request: pytest.FixtureRequest, lossy: Receiver) -> AsyncIterator[Link]:
    async with link(request.param, lossy.importer) as connected:
        yield connected


@pytest.fixture
def source(receiver_runner: ModelRunner) -> SourceKV:
    return SourceKV(receiver_runner.spec, PROMPT)


async def finish(receiver: Receiver) -> list[bytes]:
    imported = await receiver.importer.claim("transfer-1")
    layers = await receiver.read(imported)
    receiver.importer.release(imported)
    await receiver.all_given_back()
    return layers


@pytest.mark.parametrize("part_bytes", [1, 300, 1 << 20])
async def test_int8_arrives_rounded_in_a_quarter_of_the_bytes(
    way: Link, lossy: Receiver, source: SourceKV, part_bytes: int
) -> None:
    stream = await way.transport.open(source.offer(encodings=(INT8,)), way.peer)
    assert stream.reservation.encoding is INT8
    num_bytes = len(PROMPT) * source.spec.layer_bytes_per_token(0, len(source.spec.layers), INT8)
    assert await send_all(stream, source, part_bytes) == num_bytes == lossy.importer.num_bytes_received
    assert num_bytes < len(PROMPT) * source.spec.bytes_per_token
    exact = source.layers
    source.pass_through(INT8)
    assert await finish(lossy) == source.layers != exact


@pytest.mark.parametrize("kind", TRANSPORTS)
async def test_a_receiver_that_declines_int8_gets_native_kv(kind: str, receiver: Receiver, source: SourceKV) -> None:
    async with link(kind, receiver.importer) as way:
        stream = await way.transport.open(source.offer(encodings=(INT8,)), way.peer)
        assert stream.reservation.encoding is KVEncoding.NATIVE
        assert await send_all(stream, source) == len(PROMPT) * source.spec.bytes_per_token
        assert await finish(receiver) == source.layers


async def test_a_sender_that_offers_no_int8_sends_native_kv(way: Link, lossy: Receiver, source: SourceKV) -> None:
    stream = await way.transport.open(source.offer(), way.peer)
    assert stream.reservation.encoding is KVEncoding.NATIVE
    await send_all(stream, source)
    assert await finish(lossy) == source.layers


async def test_native_parts_are_accepted_after_int8_was_negotiated(
    way: Link, lossy: Receiver, source: SourceKV
) -> None:
    stream = await way.transport.open(source.offer(encodings=(INT8,)), way.peer)
    for header, payload in source.parts():
        await stream.send(header, payload)
    await stream.commit()
    assert await finish(lossy) == source.layers


@pytest.mark.parametrize("kind", TRANSPORTS)
async def test_unnegotiated_int8_is_refused(kind: str, receiver: Receiver, source: SourceKV) -> None:
    async with link(kind, receiver.importer) as way:
        stream = await way.transport.open(source.offer(encodings=(INT8,)), way.peer)
        with pytest.raises(TransferError, match="encoded as int8, which was not agreed on"):
            await send_parts(stream, list(source.parts(encoding=INT8)))
        await receiver.all_given_back()


async def send_parts(stream: object, parts: list[tuple[PartHeader, Payload]]) -> None:
    for header, payload in parts:
        await stream.send(header, payload)  # type: ignore[attr-defined]
    await stream.commit()  # type: ignore[attr-defined]


@pytest.mark.parametrize("change", ["shorter", "longer", "called native", "native called int8"])
async def test_the_length_depends_on_the_encoding(way: Link, lossy: Receiver, source: SourceKV, change: str) -> None:
    header, payload = next(source.parts(encoding=INT8))
    size = len(payload)
    if change == "shorter":
        payload = payload[:-1]
    elif change == "longer":
        payload = bytearray(payload) + bytes(1)
    elif change == "called native":
        header = replace(header, encoding=KVEncoding.NATIVE)
        size = header.num_bytes(source.spec)
    else:
        payload = source.payload(replace(header, encoding=KVEncoding.NATIVE))
    stream = await way.transport.open(source.offer(encodings=(INT8,)), way.peer)
    with pytest.raises(TransferError, match=f"{len(payload)} bytes, but its header announced {size}"):
        await send_parts(stream, [(header, payload)])
    await lossy.all_given_back()


def reserve(source: SourceKV, *encodings: str, transfer_id: str = "transfer-1") -> bytes:
    message = KVReserve(
        transfer_id=transfer_id,
        spec_json=source.spec.to_json(),
        spec_fingerprint=source.spec.fingerprint(),
        token_ids=PROMPT,
        deadline_s=1.0,
        encodings=encodings,
    )
    return encode_frame(KVFrame(reserve=message))


def int8_part(source: SourceKV) -> bytes:
    header, payload = next(source.parts(encoding=INT8))
    return encode_part(pack_part(header, checksum(payload)), payload)


async def test_unknown_encodings_in_an_offer_are_ignored(lossy: Receiver, source: SourceKV) -> None:
    async with link("grpc", lossy.importer) as way:
        replies, _ = await talk(way.peer, [reserve(source, "fp3", "int8"), int8_part(source)])
        assert replies[:2] == ["reserved", "received"]
        replies, _ = await talk(way.peer, [reserve(source, "fp3", transfer_id="another"), int8_part(source)])
        assert replies == ["reserved", f"failed: {TransferError.code}"]
    await lossy.all_given_back()


async def test_a_part_in_an_unknown_encoding_ends_the_transfer(lossy: Receiver, source: SourceKV) -> None:
    frame = encode_frame(KVFrame(part=KVPart(token_count=1, layer_end=1, encoding="fp3")), b"1234")
    async with link("grpc", lossy.importer) as way:
        replies, code = await talk(way.peer, [reserve(source, "int8"), frame])
    assert replies == ["reserved", f"failed: {TransferError.code}"]
    assert code == TransferError.code
    await lossy.all_given_back()


class InsistingSink(RecordingSink):
    """Wants int8, whatever was offered."""

    async def reserve(self, offer: TransferOffer) -> Reservation:
        return Reservation(0, encoding=INT8)


async def test_a_receiver_that_selects_an_unoffered_encoding_gets_nothing(source: SourceKV) -> None:
    sink = InsistingSink()
    async with link("grpc", sink) as way:
        with pytest.raises(TransferError, match="requests KV as int8, which was not offered"):
            await way.transport.open(source.offer(), way.peer)
        stream = await way.transport.open(source.offer(encodings=(INT8,)), way.peer)
        await stream.abort()


@pytest.mark.parametrize(("kind", "shares"), [("grpc", False), ("in_process", False), ("shared", True)])
async def test_the_sender_knows_whether_memory_is_shared(
    kind: str, shares: bool, receiver: Receiver, source: SourceKV
) -> None:
    async with link(kind, receiver.importer) as way:
        stream = await way.transport.open(source.offer(), way.peer)
        assert stream.reservation.shares_memory == shares
        await stream.abort()
    await receiver.all_given_back()
