"""Reservations of blocks: waiting, cancellation, and the room that running requests keep."""

from __future__ import annotations

import asyncio
import time

import pytest

from baton.core.errors import InvalidRequestError, OutOfBlocksError
from baton.core.request import Request, SamplingParams
from baton.kv_transfer.base import Reservation, TransferOffer
from tests.kv_receiver import NUM_BLOCKS, Receiver, SourceKV
from tests.observers import CallOn
from tests.tiny_models import random_prompts
from tests.waiting import TIMEOUT_S, until

ID = "transfer-1"


@pytest.mark.parametrize("pauses", range(5))
async def test_a_cancelled_reservation_frees_its_blocks(receiver: Receiver, source: SourceKV, pauses: int) -> None:
    reservation = asyncio.create_task(receiver.importer.reserve(source.offer(ID)))
    for _ in range(pauses):
        await asyncio.sleep(0)
    reservation.cancel()
    await asyncio.gather(reservation, return_exceptions=True)
    receiver.importer.abort(ID, "as the service would")
    await receiver.all_given_back()


async def test_a_reservation_cancelled_while_waiting_for_room_frees_its_blocks(
    receiver: Receiver, source: SourceKV
) -> None:
    taken = await receiver.take_blocks(NUM_BLOCKS)
    reservation = asyncio.create_task(receiver.importer.reserve(source.offer(ID, deadline_s=60.0)))
    await asyncio.sleep(0.05)
    assert receiver.importer.num_active == 1
    reservation.cancel()
    await asyncio.gather(reservation, return_exceptions=True)
    await receiver.give_back(taken)
    await receiver.all_given_back()


async def test_freed_room_goes_to_the_next_reservation(receiver: Receiver) -> None:
    whole = SourceKV(receiver.spec, random_prompts((NUM_BLOCKS * 4,))[0])
    await receiver.importer.reserve(whole.offer("first"))
    second = asyncio.create_task(receiver.importer.reserve(whole.offer("second", deadline_s=5.0)))
    await asyncio.sleep(0.05)
    assert not second.done()
    receiver.importer.abort("first", "making room")
    assert (await asyncio.wait_for(second, TIMEOUT_S)).num_cached_tokens == 0
    receiver.importer.abort("second", "over")
    await receiver.all_given_back()


async def reserve_in_order(receiver: Receiver, *offers: TransferOffer) -> list[asyncio.Task[Reservation]]:
    """Begins reservations, each after the one before has room or its place in the line."""
    tasks = []
    for offer in offers:
        line, length = receiver.importer._line, len(receiver.importer._line)
        tasks.append(task := asyncio.create_task(receiver.importer.reserve(offer)))
        await until(lambda task=task, line=line, length=length: task.done() or len(line) > length)
    return tasks


async def test_small_prompts_take_room_before_a_large_one_that_waits(receiver: Receiver) -> None:
    taken = await receiver.take_blocks(NUM_BLOCKS // 2)
    large, small = (SourceKV(receiver.spec, random_prompts((size,))[0]) for size in (NUM_BLOCKS * 4, 4))
    waiting, served = await reserve_in_order(
        receiver, large.offer("large", deadline_s=60.0), small.offer("small", deadline_s=60.0)
    )
    assert (await asyncio.wait_for(served, TIMEOUT_S)).num_cached_tokens == 0
    assert not waiting.done()
    receiver.importer.abort("small", "over")
    await receiver.give_back(taken)
    await asyncio.wait_for(waiting, TIMEOUT_S)
    receiver.importer.abort("large", "over")
    await receiver.all_given_back()


async def test_a_large_prompt_that_has_waited_long_is_overtaken_no_more(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decode_worker.kv_import._OVERTAKING_SHARE", 0.0)
    taken = await receiver.take_blocks(NUM_BLOCKS // 2)
    large, small = (SourceKV(receiver.spec, random_prompts((size,))[0]) for size in (NUM_BLOCKS * 4, 4))
    first, second = await reserve_in_order(
        receiver, large.offer("large", deadline_s=60.0), small.offer("small", deadline_s=60.0)
    )
    await asyncio.sleep(0.05)
    assert not first.done()
    assert not second.done(), "there is room for it, but the large one comes first"
    await receiver.give_back(taken)
    await asyncio.wait_for(first, TIMEOUT_S)
    assert not second.done()
    receiver.importer.abort("large", "over")
    await asyncio.wait_for(second, TIMEOUT_S)
    receiver.importer.abort("small", "over")
    await receiver.all_given_back()


async def test_those_behind_one_that_gives_up_get_its_turn(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decode_worker.kv_import._OVERTAKING_SHARE", 0.0)
    taken = await receiver.take_blocks(NUM_BLOCKS // 2)
    large, small = (SourceKV(receiver.spec, random_prompts((size,))[0]) for size in (NUM_BLOCKS * 4, 4))
    first, second = await reserve_in_order(
        receiver, large.offer("large", deadline_s=0.2), small.offer("small", deadline_s=60.0)
    )
    with pytest.raises(OutOfBlocksError, match=r"within 0\.2 s"):
        await first
    await asyncio.wait_for(second, TIMEOUT_S)
    receiver.importer.abort("small", "over")
    await receiver.give_back(taken)
    await receiver.all_given_back()


async def test_prompts_beyond_the_context_or_the_vocabulary_are_refused(receiver: Receiver) -> None:
    limit = receiver.engine.scheduler.limits.max_model_len
    for tokens, message in (((1,) * (limit + 1), f"takes at most {limit}"), ((1, 2**32 - 1), "token id 4294967295")):
        with pytest.raises(InvalidRequestError, match=message):
            await receiver.importer.reserve(TransferOffer(ID, receiver.spec, tokens, 1.0))
    assert receiver.importer.num_active == 0
    await receiver.all_given_back()


async def test_running_requests_keep_room_to_grow(receiver: Receiver) -> None:
    prompt = random_prompts((8,), seed=3)[0]
    request = Request("running", prompt, SamplingParams(max_tokens=80, temperature=0))
    # A tiny model would be through with it before the reservation comes.
    receiver.engine.subscribe(CallOn(scheduled=lambda _: time.sleep(0.02)))
    outputs = receiver.engine.generate(request)
    await anext(outputs)
    free = NUM_BLOCKS - await receiver.num_used_blocks()
    exactly = SourceKV(receiver.spec, random_prompts((free * 4,), seed=4)[0])
    with pytest.raises(OutOfBlocksError):
        await receiver.importer.reserve(exactly.offer(ID, deadline_s=0.01))
    await outputs.aclose()
    await receiver.all_given_back()
