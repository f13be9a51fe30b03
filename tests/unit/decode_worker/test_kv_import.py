"""Whatever happens to a transfer and to the request that comes for it, in whatever order: no block is lost."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
import torch

from baton.core.errors import ChecksumError, OutOfBlocksError, TransferError
from baton.core.request import Request, SamplingParams
from baton.engine.runner.model_runner import ModelRunner
from baton.kv_transfer.base import PartHeader
from baton.kv_transfer.codec import checksum
from tests.kv_receiver import NUM_BLOCKS, PROMPT, Receiver, SourceKV, running_receiver
from tests.observers import CallOn
from tests.waiting import TIMEOUT_S

NUM_PROMPT_BLOCKS = 6
ID = "transfer-1"


async def write(receiver: Receiver, header: PartHeader, payload: bytearray, transfer_id: str = ID) -> None:
    await receiver.importer.write(transfer_id, header, memoryview(payload), checksum(payload))


async def push(receiver: Receiver, source: SourceKV, num_parts: int | None = None) -> None:
    """Reserves and writes the first ``num_parts`` parts, or all."""
    cached = (await receiver.importer.reserve(source.offer(ID))).num_cached_tokens
    for header, payload in list(source.parts(cached))[:num_parts]:
        await write(receiver, header, payload)


async def has_failed(claim: asyncio.Task[object]) -> str:
    with pytest.raises(TransferError) as caught:
        await asyncio.wait_for(claim, TIMEOUT_S)
    return caught.value.message


async def test_a_claim_waits_for_the_commit(receiver: Receiver, source: SourceKV) -> None:
    claim = asyncio.create_task(receiver.importer.claim(ID))  # comes before the reservation even
    await asyncio.sleep(0)
    await push(receiver, source)
    assert receiver.importer.num_active == 1
    assert not claim.done()
    await receiver.importer.commit(ID)
    imported = await asyncio.wait_for(claim, TIMEOUT_S)
    assert receiver.importer.num_active == 0
    assert await receiver.read(imported) == source.layers
    assert await receiver.num_used_blocks() == NUM_PROMPT_BLOCKS
    receiver.importer.release(imported)
    receiver.importer.release(imported)
    await receiver.all_given_back()


async def test_unclaimed_kv_expires(hasty: Receiver, source: SourceKV) -> None:
    await push(hasty, source)
    await hasty.importer.commit(ID)
    assert await hasty.num_used_blocks() == NUM_PROMPT_BLOCKS
    await hasty.all_given_back()
    with pytest.raises(TransferError, match=r"made no progress for 0\.1 s"):
        await hasty.importer.claim(ID)


async def test_unneeded_kv_is_freed_at_once(receiver: Receiver, source: SourceKV) -> None:
    """As when a request is over with its first token, while its KV is on the way or there."""
    receiver.importer.abandon(ID)  # of which nothing is known
    await push(receiver, source, num_parts=2)
    receiver.importer.abandon(ID)
    await receiver.all_given_back()
    with pytest.raises(TransferError, match="not open"):
        await write(receiver, *list(source.parts())[2])
    await push(receiver, source)
    await receiver.importer.commit(ID)
    receiver.importer.abandon(ID)
    await receiver.all_given_back()


async def test_claimed_kv_stays_with_its_request(receiver: Receiver, source: SourceKV) -> None:
    claim = asyncio.create_task(receiver.importer.claim(ID))
    await push(receiver, source)
    receiver.importer.abandon(ID)
    await receiver.importer.commit(ID)
    imported = await claim
    receiver.importer.abandon(ID)
    assert await receiver.read(imported) == source.layers
    receiver.importer.release(imported)
    await receiver.all_given_back()


async def test_a_claim_before_the_expiry_keeps_the_kv(hasty: Receiver, source: SourceKV) -> None:
    await push(hasty, source)
    await hasty.importer.commit(ID)
    imported = await hasty.importer.claim(ID)
    await asyncio.sleep(0.2)
    assert await hasty.read(imported) == source.layers
    hasty.importer.release(imported)
    await hasty.all_given_back()


async def test_a_claim_without_a_transfer_times_out(hasty: Receiver, source: SourceKV) -> None:
    with pytest.raises(TransferError, match=r"made no progress for 0\.1 s"):
        await hasty.importer.claim(ID)
    await push(hasty, source)  # late: no claim waits for it any more
    await hasty.importer.commit(ID)
    await hasty.all_given_back()


async def test_a_claim_that_times_out_ends_the_transfer(hasty: Receiver, source: SourceKV) -> None:
    await push(hasty, source, num_parts=2)
    with pytest.raises(TransferError, match=r"made no progress for 0\.1 s"):
        await hasty.importer.claim(ID)
    with pytest.raises(TransferError, match="not open"):
        await write(hasty, *list(source.parts())[2])
    await hasty.all_given_back()


async def test_a_transfer_is_claimed_once(receiver: Receiver, source: SourceKV) -> None:
    claim = asyncio.create_task(receiver.importer.claim(ID))
    await asyncio.sleep(0)
    with pytest.raises(TransferError, match="already been claimed"):
        await receiver.importer.claim(ID)
    await push(receiver, source)
    await receiver.importer.commit(ID)
    receiver.importer.release(await claim)
    await receiver.all_given_back()


async def test_a_waiting_claim_gets_the_reason_of_an_abort(receiver: Receiver, source: SourceKV) -> None:
    claim = asyncio.create_task(receiver.importer.claim(ID))
    await push(receiver, source, num_parts=1)
    receiver.importer.abort(ID, "the sender caught fire")
    assert "the sender caught fire" in await has_failed(claim)
    await receiver.all_given_back()


async def test_a_late_claim_gets_the_reason_of_an_abort(hasty: Receiver, source: SourceKV) -> None:
    await push(hasty, source, num_parts=1)
    hasty.importer.abort(ID, "the sender caught fire")
    with pytest.raises(TransferError, match="the sender caught fire"):
        await hasty.importer.claim(ID)
    await hasty.all_given_back()

    again = SourceKV(hasty.spec, PROMPT)
    assert (await hasty.importer.reserve(again.offer(ID))).num_cached_tokens == 0  # and then the name is free again
    hasty.importer.abort(ID, "enough")
    await asyncio.sleep(0.2)
    with pytest.raises(TransferError, match="no progress"):
        await hasty.importer.claim(ID)


async def test_cancelling_a_claim_while_parts_arrive_frees_the_blocks(receiver: Receiver, source: SourceKV) -> None:
    claim = asyncio.create_task(receiver.importer.claim(ID))
    await push(receiver, source, num_parts=2)
    claim.cancel()
    await asyncio.gather(claim, return_exceptions=True)
    with pytest.raises(TransferError, match="not open"):
        await write(receiver, *list(source.parts())[2])
    with pytest.raises(TransferError, match="not open"):
        await receiver.importer.commit(ID)
    receiver.importer.abort(ID, "as the service would")
    await receiver.all_given_back()


async def test_cancelling_a_claim_while_the_reservation_waits_frees_the_blocks(
    receiver: Receiver, source: SourceKV
) -> None:
    taken = await receiver.take_blocks(NUM_BLOCKS)
    claim = asyncio.create_task(receiver.importer.claim(ID))
    reservation = asyncio.create_task(receiver.importer.reserve(source.offer(ID, deadline_s=60.0)))
    await asyncio.sleep(0.05)
    claim.cancel()
    await asyncio.gather(claim, return_exceptions=True)
    assert "cancelled" in await has_failed(reservation)
    await receiver.give_back(taken)
    await receiver.all_given_back()


async def test_cancelling_a_claim_as_the_reservation_succeeds_frees_the_blocks(
    receiver: Receiver, source: SourceKV
) -> None:
    for pauses in range(4):
        claim = asyncio.create_task(receiver.importer.claim(ID))
        reservation = asyncio.create_task(receiver.importer.reserve(source.offer(ID)))
        for _ in range(pauses):
            await asyncio.sleep(0)
        claim.cancel()
        await asyncio.gather(claim, reservation, return_exceptions=True)
        receiver.importer.abort(ID, "as the service would")
        await receiver.all_given_back()


async def test_a_waiting_claim_is_told_that_there_is_no_room(receiver: Receiver, source: SourceKV) -> None:
    taken = await receiver.take_blocks(NUM_BLOCKS)
    claim = asyncio.create_task(receiver.importer.claim(ID))
    with pytest.raises(OutOfBlocksError):
        await receiver.importer.reserve(source.offer(ID, deadline_s=0.05))
    assert "no free KV blocks for 22 tokens" in await has_failed(claim)
    await receiver.give_back(taken)
    await receiver.all_given_back()


@pytest.mark.parametrize("ended", ["aborted", "committed", "unknown", "claimed"])
async def test_nothing_is_written_without_an_open_transfer(receiver: Receiver, source: SourceKV, ended: str) -> None:
    if ended != "unknown":
        await push(receiver, source)
    if ended == "aborted":
        receiver.importer.abort(ID, "over")
    if ended in ("committed", "claimed"):
        await receiver.importer.commit(ID)
    imported = await receiver.importer.claim(ID) if ended == "claimed" else None
    cache = receiver.engine.runner.cache
    before = [tensor.clone() for tensor in (*cache.keys, *cache.values)]
    for header, payload in SourceKV(receiver.spec, PROMPT, seed=9).parts():
        with pytest.raises(TransferError, match="not open"):
            await write(receiver, header, payload)
    with pytest.raises(TransferError, match="not open"):
        await receiver.importer.commit(ID)
    for tensor, old in zip((*cache.keys, *cache.values), before, strict=True):
        assert torch.equal(tensor.nan_to_num(), old.nan_to_num())
    if ended == "committed":
        imported = await receiver.importer.claim(ID)
    if imported is not None:
        receiver.importer.release(imported)
    await receiver.all_given_back()


async def test_nothing_is_written_while_the_reservation_waits(receiver: Receiver, source: SourceKV) -> None:
    taken = await receiver.take_blocks(NUM_BLOCKS)
    reservation = asyncio.create_task(receiver.importer.reserve(source.offer(ID, deadline_s=5.0)))
    await asyncio.sleep(0.02)
    with pytest.raises(TransferError, match="not open"):
        await write(receiver, *next(source.parts()))
    with pytest.raises(TransferError, match="not open"):
        await receiver.importer.commit(ID)
    await receiver.give_back(taken)
    assert (await reservation).num_cached_tokens == 0
    receiver.importer.abort(ID, "over")
    await receiver.all_given_back()


async def test_a_damaged_part_is_not_stored(receiver: Receiver, source: SourceKV) -> None:
    await receiver.importer.reserve(source.offer(ID))
    header, payload = next(source.parts())
    cache = receiver.engine.runner.cache
    digest = checksum(payload)
    payload[5] ^= 1
    with pytest.raises(ChecksumError):
        await receiver.importer.write(ID, header, memoryview(payload), digest)
    assert all(torch.isnan(tensor).all() for tensor in (*cache.keys, *cache.values))
    receiver.importer.abort(ID, "damaged")
    await receiver.all_given_back()


@pytest.mark.parametrize("pauses", range(4))
async def test_an_abort_during_the_commit_ends_the_transfer_or_comes_too_late(
    receiver: Receiver, source: SourceKV, pauses: int
) -> None:
    await push(receiver, source)
    commit = asyncio.create_task(receiver.importer.commit(ID))
    for _ in range(pauses):
        await asyncio.sleep(0)
    receiver.importer.abort(ID, "too early")
    results = await asyncio.gather(commit, return_exceptions=True)
    if isinstance(results[0], TransferError):
        with pytest.raises(TransferError, match="too early"):
            await receiver.importer.claim(ID)
    else:
        assert results == [len(PROMPT) * receiver.spec.bytes_per_token]
        receiver.importer.release(await receiver.importer.claim(ID))
    await receiver.all_given_back()


async def test_the_request_takes_over_the_blocks(receiver: Receiver, source: SourceKV) -> None:
    await push(receiver, source)
    await receiver.importer.commit(ID)
    imported = await receiver.importer.claim(ID)
    request = Request("request-1", list(PROMPT), SamplingParams(max_tokens=9, temperature=0), output_token_ids=[5])
    given_back, used = threading.Event(), list[int]()

    def computed(plan: object) -> None:
        if used:
            given_back.wait(5.0)  # or a fast engine is done before the test has had a look
        used.append(receiver.engine.blocks.usage().used)

    receiver.engine.subscribe(CallOn(computed=computed))
    outputs = receiver.engine.generate(request, lambda adopting: receiver.importer.hand_over(imported, adopting))
    await anext(outputs)
    assert request.num_computed_tokens > len(PROMPT)
    receiver.importer.release(imported)  # what was handed over stays with the request
    given_back.set()
    async for _ in outputs:
        pass
    assert used[-1] >= NUM_PROMPT_BLOCKS
    await receiver.all_given_back()


@pytest.mark.parametrize("prefix_caching", [True, False])
async def test_committed_blocks_are_found_with_prefix_caching(
    receiver_runner: ModelRunner, source: SourceKV, prefix_caching: bool
) -> None:
    async with running_receiver(receiver_runner, prefix_caching=prefix_caching) as receiver:
        await push(receiver, source)
        await receiver.importer.commit(ID)
        receiver.importer.release(await receiver.importer.claim(ID))
        cached = (await receiver.importer.reserve(source.offer("again"))).num_cached_tokens
        assert cached == (20 if prefix_caching else 0)
        receiver.importer.abort("again", "over")
        await receiver.all_given_back()


async def test_an_aborted_transfer_leaves_nothing_in_the_prefix_cache(receiver: Receiver, source: SourceKV) -> None:
    await push(receiver, source)
    receiver.importer.abort(ID, "before the commit")
    assert (await receiver.importer.reserve(source.offer("again"))).num_cached_tokens == 0
    receiver.importer.abort("again", "over")
    await receiver.all_given_back()


async def test_a_slow_transfer_that_makes_progress_does_not_time_out(
    receiver_runner: ModelRunner, source: SourceKV
) -> None:
    async with running_receiver(receiver_runner, claim_timeout_s=1.0) as receiver:
        claim = asyncio.create_task(receiver.importer.claim(ID))
        await receiver.importer.reserve(source.offer(ID))
        started_s = time.monotonic()
        for header, payload in source.parts():
            await asyncio.sleep(0.25)  # a quarter of the patience; all parts together take longer than all of it
            await write(receiver, header, payload)
        assert time.monotonic() - started_s > 1.0
        assert not claim.done()
        await receiver.importer.commit(ID)
        receiver.importer.release(await claim)
        await receiver.all_given_back()
