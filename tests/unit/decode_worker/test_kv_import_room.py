"""Reservations of blocks: waiting, cancellation, and the room that running requests keep."""

from __future__ import annotations

import asyncio
import time

import pytest

from baton.core.errors import OutOfBlocksError
from baton.core.request import Request, SamplingParams
from tests.kv_receiver import NUM_BLOCKS, Receiver, SourceKV
from tests.observers import CallOn
from tests.tiny_models import random_prompts

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
    assert (await asyncio.wait_for(second, 10.0)).num_cached_tokens == 0
    receiver.importer.abort("second", "over")
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
