"""The contract of KV transports, tested against the decode worker's own sink."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from baton.core.errors import (
    ChecksumError,
    ContextLengthError,
    LayoutMismatchError,
    OutOfBlocksError,
    TransferError,
    WorkerLostError,
)
from baton.core.kv_spec import KVCacheSpec, LayerSpec
from baton.kv_transfer import sender as grpc_transport
from baton.kv_transfer.base import KVSendStream, PartHeader, Payload
from baton.kv_transfer.flow import Throttle
from baton.kv_transfer.payload import in_process
from tests.kv_receiver import NUM_BLOCKS, Receiver, SourceKV
from tests.tiny_models import random_prompts
from tests.unit.baton.kv_transfer.links import TRANSPORTS, Link, link, send_all
from tests.waiting import TIMEOUT_S

PROMPT = random_prompts((22,))[0]
NUM_PROMPT_BLOCKS = 6


@pytest.fixture(params=TRANSPORTS)
async def way(request: pytest.FixtureRequest, receiver: Receiver) -> AsyncIterator[Link]:
    async with link(request.param, receiver.importer) as connected:
        yield connected


@pytest.fixture
def source(receiver: Receiver) -> SourceKV:
    return SourceKV(receiver.spec, PROMPT)


async def deliver(way: Link, source: SourceKV, transfer_id: str, receiver: Receiver) -> None:
    """A whole transfer, claimed and released: its full blocks stay in the prefix cache."""
    await send_all(await way.transport.open(source.offer(transfer_id), way.peer), source)
    receiver.importer.release(await receiver.importer.claim(transfer_id))


@pytest.mark.parametrize("part_bytes", [1, 300, 1000, 1 << 20])
async def test_every_byte_arrives_at_its_position(
    way: Link, receiver: Receiver, source: SourceKV, part_bytes: int
) -> None:
    stream = await way.transport.open(source.offer(), way.peer)
    assert stream.reservation.num_cached_tokens == 0
    assert await send_all(stream, source, part_bytes) == len(PROMPT) * source.spec.bytes_per_token

    imported = await receiver.importer.claim("transfer-1")
    assert await receiver.read(imported) == source.layers
    assert receiver.importer.num_bytes_received == len(PROMPT) * source.spec.bytes_per_token
    receiver.importer.release(imported)
    await receiver.all_given_back()


async def test_a_prefix_held_by_the_receiver_is_not_sent(way: Link, receiver: Receiver) -> None:
    first = SourceKV(receiver.spec, PROMPT)
    await deliver(way, first, "first", receiver)

    longer = SourceKV(receiver.spec, [*PROMPT, 7, 8, 9, 10, 11], seed=1)
    stream = await way.transport.open(longer.offer("second"), way.peer)
    assert stream.reservation.num_cached_tokens == 20  # five full blocks of four; the sixth was not full
    assert await send_all(stream, longer) == 7 * receiver.spec.bytes_per_token
    imported = await receiver.importer.claim("second")
    prefix = 20 * receiver.spec.layer_bytes_per_token(0, 1) // 2
    for layer, got in enumerate(await receiver.read(imported)):
        assert got[:prefix] == first.layers[layer][:prefix]
    receiver.importer.release(imported)
    await receiver.all_given_back()


async def test_nothing_is_sent_for_a_fully_cached_prompt(way: Link, receiver: Receiver) -> None:
    source = SourceKV(receiver.spec, PROMPT[:20])
    await deliver(way, source, "first", receiver)
    stream = await way.transport.open(source.offer("second"), way.peer)
    assert stream.reservation.num_cached_tokens == 20
    assert await stream.commit() == 0
    receiver.importer.release(await receiver.importer.claim("second"))
    await receiver.all_given_back()


def _other_layers(spec: KVCacheSpec) -> KVCacheSpec:
    layer = spec.layers[0]
    return replace(spec, layers=(LayerSpec(layer.num_kv_heads + 1, layer.key_dim, layer.value_dim), *spec.layers[1:]))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda spec: replace(spec, dtype="bfloat16"), "dtype: float32 here, bfloat16 there"),
        (lambda spec: replace(spec, block_size=8), "block_size: 4 here, 8 there"),
        (lambda spec: replace(spec, model_fingerprint="another"), "model_fingerprint"),
        (lambda spec: replace(spec, layers=spec.layers[:1]), "number of layers: 2 here, 1 there"),
        (_other_layers, "layer 0"),
    ],
)
async def test_another_layout_is_refused_before_any_byte_is_sent(
    way: Link, receiver: Receiver, change: object, named: str
) -> None:
    assert callable(change)
    offer = replace(SourceKV(receiver.spec, PROMPT).offer(), spec=change(receiver.spec))
    with pytest.raises(LayoutMismatchError, match=named):
        await way.transport.open(offer, way.peer)
    assert receiver.importer.num_bytes_received == 0
    await receiver.all_given_back()


async def test_damage_in_transit_is_detected(
    way: Link, receiver: Receiver, source: SourceKV, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def wrong_third_checksum(payload: Payload) -> int:
        nonlocal calls
        calls += 1
        return true_checksum(payload) ^ (1 if calls == 3 else 0)

    true_checksum = grpc_transport.checksum
    for module in (grpc_transport, in_process):
        monkeypatch.setattr(module, "checksum", wrong_third_checksum)
    stream = await way.transport.open(source.offer(), way.peer)
    with pytest.raises(ChecksumError, match="corrupted"):
        await send_all(stream, source)
    with pytest.raises(TransferError, match="corrupted"):
        await receiver.importer.claim("transfer-1")
    await receiver.all_given_back()


def _swapped(parts: list[tuple[PartHeader, Payload]]) -> None:
    parts[0], parts[1] = parts[1], parts[0]


def _repeated(parts: list[tuple[PartHeader, Payload]]) -> None:
    parts.insert(1, parts[0])


def _missing_first(parts: list[tuple[PartHeader, Payload]]) -> None:
    del parts[0]


def _missing_last(parts: list[tuple[PartHeader, Payload]]) -> None:
    del parts[-1]


def _too_short(parts: list[tuple[PartHeader, Payload]]) -> None:
    header, payload = parts[1]
    parts[1] = (header, bytes(payload)[:-4])


def _too_long(parts: list[tuple[PartHeader, Payload]]) -> None:
    header, payload = parts[1]
    parts[1] = (header, bytes(payload) + bytes(4))


def _beyond_the_prompt(parts: list[tuple[PartHeader, Payload]]) -> None:
    header, payload = parts[-1]
    token_bytes = len(payload) // header.token_count
    parts[-1] = (replace(header, token_count=header.token_count + 1), bytes(payload) + bytes(token_bytes))


def _empty(parts: list[tuple[PartHeader, Payload]]) -> None:
    parts.insert(0, (replace(parts[0][0], token_count=0), b""))


def _layers_that_do_not_exist(parts: list[tuple[PartHeader, Payload]]) -> None:
    header, payload = parts[-1]
    parts[-1] = (replace(header, layer_end=header.layer_end + 1), payload)


def _no_layers(parts: list[tuple[PartHeader, Payload]]) -> None:
    header, _ = parts[0]
    parts[0] = (replace(header, layer_start=1, layer_end=1), b"")


@pytest.mark.parametrize(
    "spoil",
    [
        _swapped,
        _repeated,
        _missing_first,
        _missing_last,
        _too_short,
        _too_long,
        _beyond_the_prompt,
        _empty,
        _layers_that_do_not_exist,
        _no_layers,
    ],
)
async def test_wrong_parts_end_the_transfer(way: Link, receiver: Receiver, source: SourceKV, spoil: object) -> None:
    assert callable(spoil)
    parts: list[tuple[PartHeader, Payload]] = list(source.parts())
    spoil(parts)
    stream = await way.transport.open(source.offer(), way.peer)
    with pytest.raises(TransferError):
        await _send_parts(stream, parts)
    await receiver.all_given_back()


async def _send_parts(stream: KVSendStream, parts: list[tuple[PartHeader, Payload]]) -> None:
    for header, payload in parts:
        await stream.send(header, payload)
    await stream.commit()


async def test_a_second_transfer_with_the_same_id_is_refused_and_harmless(
    way: Link, receiver: Receiver, source: SourceKV
) -> None:
    stream = await way.transport.open(source.offer(), way.peer)
    with pytest.raises(TransferError, match="already begun"):
        await way.transport.open(source.offer(), way.peer)
    assert await send_all(stream, source) == len(PROMPT) * source.spec.bytes_per_token
    imported = await receiver.importer.claim("transfer-1")
    assert await receiver.read(imported) == source.layers
    receiver.importer.release(imported)
    await receiver.all_given_back()


async def test_an_unreachable_address_is_a_lost_worker(way: Link, source: SourceKV) -> None:
    with pytest.raises(WorkerLostError):
        await way.transport.open(source.offer(), "127.0.0.1:1")


@pytest.mark.parametrize("num_sent", [0, 1, 3, None])
async def test_aborting_at_any_stage_frees_the_blocks(
    way: Link, receiver: Receiver, source: SourceKV, num_sent: int | None
) -> None:
    stream = await way.transport.open(source.offer(), way.peer)
    for header, payload in list(source.parts())[:num_sent]:
        await stream.send(header, payload)
    assert await receiver.num_used_blocks() == NUM_PROMPT_BLOCKS
    await stream.abort()
    await stream.abort()
    await receiver.all_given_back()
    with pytest.raises(TransferError, match="The KV transfer failed"):
        await receiver.importer.claim("transfer-1")
    with pytest.raises(TransferError):
        await stream.commit()


async def test_aborting_after_the_commit_changes_nothing(way: Link, receiver: Receiver, source: SourceKV) -> None:
    stream = await way.transport.open(source.offer(), way.peer)
    await send_all(stream, source)
    await stream.abort()
    await asyncio.sleep(0.05)
    imported = await receiver.importer.claim("transfer-1")
    assert await receiver.read(imported) == source.layers
    receiver.importer.release(imported)
    await receiver.all_given_back()


@pytest.mark.parametrize("kind", TRANSPORTS)
@pytest.mark.parametrize("after_s", [0.0, 0.02, 0.06])
async def test_a_cancelled_sender_leaves_nothing(
    kind: str, receiver: Receiver, source: SourceKV, after_s: float
) -> None:
    async def run(way: Link) -> None:
        stream = await way.transport.open(source.offer(), way.peer)
        try:
            await send_all(stream, source)
        finally:
            await stream.abort()

    async with link(kind, receiver.importer, throttle=Throttle(20_000)) as way:
        task = asyncio.create_task(run(way))
        await asyncio.sleep(after_s)
        task.cancel()
        assert isinstance((await asyncio.gather(task, return_exceptions=True))[0], asyncio.CancelledError)
        await receiver.all_given_back()


async def test_closing_the_transport_ends_open_transfers_with_an_error(
    way: Link, receiver: Receiver, source: SourceKV
) -> None:
    stream = await way.transport.open(source.offer(), way.peer)
    parts = list(source.parts())
    await stream.send(*parts[0])
    await way.transport.close()
    with pytest.raises(TransferError):
        await _send_parts(stream, parts[1:])
    await receiver.all_given_back()


async def test_closing_the_transport_ends_a_waiting_open(way: Link, receiver: Receiver, source: SourceKV) -> None:
    taken = await receiver.take_blocks(NUM_BLOCKS)
    opening = asyncio.create_task(way.transport.open(source.offer(), way.peer))
    await asyncio.sleep(0.05)
    if way.server is None:  # in one process there is no connection that could break
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
    else:
        await way.transport.close()
        with pytest.raises(TransferError):
            await opening
    await receiver.give_back(taken)
    await receiver.all_given_back()


async def test_a_transfer_waits_for_room(way: Link, receiver: Receiver, source: SourceKV) -> None:
    taken = await receiver.take_blocks(NUM_BLOCKS - NUM_PROMPT_BLOCKS + 1)
    opening = asyncio.create_task(way.transport.open(source.offer(deadline_s=5.0), way.peer))
    await asyncio.sleep(0.1)
    assert not opening.done()
    await receiver.give_back(taken)
    stream = await asyncio.wait_for(opening, TIMEOUT_S)
    await send_all(stream, source)
    receiver.importer.release(await receiver.importer.claim("transfer-1"))
    await receiver.all_given_back()


async def test_a_transfer_without_room_fails_at_its_deadline(way: Link, receiver: Receiver, source: SourceKV) -> None:
    taken = await receiver.take_blocks(NUM_BLOCKS - NUM_PROMPT_BLOCKS + 1)
    with pytest.raises(OutOfBlocksError, match=r"no free KV blocks for 22 tokens within 0\.1 s"):
        await way.transport.open(source.offer(deadline_s=0.1), way.peer)
    assert await receiver.num_used_blocks() == len(taken)
    await receiver.give_back(taken)
    await receiver.all_given_back()


async def test_a_prompt_that_can_never_fit_is_refused_at_once(way: Link, receiver: Receiver) -> None:
    source = SourceKV(receiver.spec, [5] * (NUM_BLOCKS * 4 + 1))
    with pytest.raises(ContextLengthError, match="needs 33 KV blocks, but the decode worker has 32"):
        await asyncio.wait_for(way.transport.open(source.offer(deadline_s=60.0), way.peer), TIMEOUT_S)
    await receiver.all_given_back()


async def test_concurrent_transfers_do_not_mix(way: Link, receiver: Receiver) -> None:
    sources = [SourceKV(receiver.spec, prompt, seed) for seed, prompt in enumerate(random_prompts((9, 13, 21, 8)))]

    async def run(index: int) -> None:
        stream = await way.transport.open(sources[index].offer(f"transfer-{index}"), way.peer)
        for header, payload in sources[index].parts(part_bytes=200):
            await stream.send(header, payload)
            await asyncio.sleep(0)
        await stream.commit()

    await asyncio.gather(*(run(index) for index in range(len(sources))))
    for index, source in enumerate(sources):
        imported = await receiver.importer.claim(f"transfer-{index}")
        assert await receiver.read(imported) == source.layers
        receiver.importer.release(imported)
    await receiver.all_given_back()
