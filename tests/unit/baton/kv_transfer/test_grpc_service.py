"""The KV port answers any input from strangers with a typed error and does not affect other transfers."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest

from baton.core.errors import InvalidRequestError, LayoutMismatchError, TransferError
from baton.kv_transfer.base import PartHeader
from baton.kv_transfer.codec import encode_frame, encode_part, pack_part
from baton.rpc.wire.kv_pb2 import KVCommit, KVFrame, KVReserve
from tests.kv_receiver import Receiver, SourceKV
from tests.tiny_models import random_prompts
from tests.unit.baton.kv_transfer.links import Link, link, send_all, talk

PROMPT = random_prompts((9,))[0]


@pytest.fixture
async def way(receiver: Receiver) -> AsyncIterator[Link]:
    async with link("grpc", receiver.importer) as connected:
        yield connected


def reserve(receiver: Receiver, **changes: object) -> KVFrame:
    values: dict[str, object] = {
        "transfer_id": "transfer-1",
        "spec_json": receiver.spec.to_json(),
        "spec_fingerprint": receiver.spec.fingerprint(),
        "token_ids": PROMPT,
        "deadline_s": 1.0,
    }
    return KVFrame(reserve=KVReserve(**{**values, **changes}))


def part(token_start: int = 0) -> KVFrame:
    return KVFrame(part=pack_part(PartHeader(token_start, 1, 0, 1), 0))


def commit(num_parts: int = 0, num_bytes: int = 0) -> KVFrame:
    return KVFrame(commit=KVCommit(num_parts=num_parts, num_bytes=num_bytes))


async def still_works(way: Link, receiver: Receiver) -> None:
    await receiver.all_given_back()
    source = SourceKV(receiver.spec, PROMPT)
    await send_all(await way.transport.open(source.offer("afterwards"), way.peer), source)
    receiver.importer.release(await receiver.importer.claim("afterwards"))
    await receiver.all_given_back()


@pytest.mark.parametrize(
    "first",
    [part(), commit(), KVFrame(), KVFrame(payload=b"only")],
    ids=["part", "commit", "nothing", "payload"],
)
async def test_a_transfer_starts_with_a_reservation(way: Link, receiver: Receiver, first: KVFrame) -> None:
    replies, code = await talk(way.peer, [encode_frame(first)])
    assert replies == [f"failed: {TransferError.code}"]
    assert code == TransferError.code
    await still_works(way, receiver)


@pytest.mark.parametrize(
    "second",
    [
        lambda receiver: encode_frame(reserve(receiver)),
        lambda receiver: encode_frame(KVFrame()),
        lambda receiver: encode_frame(commit()),
        lambda receiver: encode_frame(commit(num_parts=5)),
        lambda receiver: encode_frame(part(), b"1234"),
        lambda receiver: b"\xff\xff\xff",
    ],
    ids=["reserve", "nothing", "early-commit", "wrong-count", "wrong-size", "garbage"],
)
async def test_an_invalid_message_after_a_reservation_ends_the_transfer(
    way: Link, receiver: Receiver, second: Callable[[Receiver], bytes]
) -> None:
    replies, code = await talk(way.peer, [encode_frame(reserve(receiver)), second(receiver)])
    assert replies == ["reserved", f"failed: {TransferError.code}"]
    assert code == TransferError.code
    await still_works(way, receiver)


async def test_a_stream_that_ends_without_a_commit_is_aborted(way: Link, receiver: Receiver) -> None:
    replies, _ = await talk(way.peer, [encode_frame(reserve(receiver))])
    assert replies[0] == "reserved"
    with pytest.raises(TransferError):
        await receiver.importer.claim("transfer-1")
    await still_works(way, receiver)


@pytest.mark.parametrize("deadline_s", [float("nan"), float("inf"), -1.0, 1e300])
async def test_impossible_deadlines_are_refused(way: Link, receiver: Receiver, deadline_s: float) -> None:
    _, code = await talk(way.peer, [encode_frame(reserve(receiver, deadline_s=deadline_s))])
    assert code == TransferError.code
    await still_works(way, receiver)


async def test_a_transfer_without_an_id_is_refused(way: Link, receiver: Receiver) -> None:
    _, code = await talk(way.peer, [encode_frame(reserve(receiver, transfer_id=""))])
    assert code == InvalidRequestError.code
    await still_works(way, receiver)


@pytest.mark.parametrize(
    "spec_json",
    [
        "",
        "{",
        "[]",
        "1",
        "null",
        "{}",
        '{"layers": 5}',
        '{"layers": {"a": 1}}',
        '{"layers": [], "dtype": "float32"}',
        "[" * 100_000,
        '{"layers": [{"num_kv_heads": 1, "key_dim": 1, "value_dim": 1, "more": 1}]}',
    ],
)
async def test_an_unreadable_layout_is_refused(way: Link, receiver: Receiver, spec_json: str) -> None:
    _, code = await talk(way.peer, [encode_frame(reserve(receiver, spec_json=spec_json))])
    assert code == LayoutMismatchError.code
    await still_works(way, receiver)


async def test_a_layout_and_its_fingerprint_must_agree(way: Link, receiver: Receiver) -> None:
    _, code = await talk(way.peer, [encode_frame(reserve(receiver, spec_fingerprint="0" * 32))])
    assert code == LayoutMismatchError.code
    await still_works(way, receiver)


async def test_a_prompt_without_tokens_is_refused(way: Link, receiver: Receiver) -> None:
    _, code = await talk(way.peer, [encode_frame(reserve(receiver, token_ids=[]))])
    assert code is not None
    await still_works(way, receiver)


@pytest.mark.parametrize("seed", range(4))
async def test_random_streams_leak_no_block(way: Link, receiver: Receiver, seed: int) -> None:
    chance = random.Random(seed)
    source = SourceKV(receiver.spec, PROMPT)
    for round_ in range(40):
        frames = [_random_frame(chance, receiver, source, f"transfer-{round_}") for _ in range(chance.randint(0, 6))]
        replies, code = await talk(way.peer, frames)
        assert code is None or code in (
            TransferError.code,
            LayoutMismatchError.code,
            InvalidRequestError.code,
            "kv_checksum_mismatch",
        )
        assert "committed" not in replies  # no random stream carries a whole prompt
    await still_works(way, receiver)


def _random_frame(chance: random.Random, receiver: Receiver, source: SourceKV, transfer_id: str) -> bytes:
    good = [
        encode_frame(reserve(receiver, transfer_id=transfer_id)),
        *(
            encode_part(pack_part(replace(header, layer_start=0, layer_end=1), 7), part)
            for header, part in source.parts()
        ),
        encode_frame(commit(chance.randint(0, 3), chance.randint(0, 3000))),
    ]
    frame = bytearray(good[0] if chance.random() < 0.4 else chance.choice(good))
    kind = chance.random()
    if kind < 0.2:
        return chance.randbytes(chance.randint(0, 200))
    if kind < 0.5 and frame:
        frame[chance.randrange(len(frame))] ^= 1 << chance.randrange(8)
    if kind > 0.9:
        del frame[chance.randrange(len(frame)) :]
    return bytes(frame)
