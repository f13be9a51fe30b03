"""Reservations for transfers on a simulated worker and their release."""

import asyncio

import pytest

from baton.core.errors import OutOfBlocksError, TransferError
from baton.core.kv_spec import KVCacheSpec
from baton.kv_transfer.base import TransferOffer
from cluster.simulation.virtual_loop import run_virtually
from cluster.simulation.worker import SimulatedWorker
from tests.simulated import lone_worker, prompt


def offer_of(worker: SimulatedWorker, name: str, start: int, deadline_s: float = 50.0) -> TransferOffer:
    spec = KVCacheSpec("model", "bfloat16", worker.settings.block_size, layers=())
    return TransferOffer(name, spec, tuple(prompt(96, start)), deadline_s=deadline_s)


def test_the_request_gets_the_reason_why_its_transfer_has_no_room():
    async def main() -> None:
        worker = lone_worker(num_blocks=8)
        await worker.sink.reserve(offer_of(worker, "first", 1))
        waiting = asyncio.create_task(worker.sink.reserve(offer_of(worker, "second", 2, deadline_s=0.5)))
        with pytest.raises(TransferError, match=r"no free KV blocks for 96 tokens within 0\.5 s"):
            await worker.sink.claim("second")
        with pytest.raises(OutOfBlocksError):
            await waiting

    run_virtually(main)


def test_a_transfer_abandoned_while_waiting_takes_no_room():
    """Its request is gone. If it got blocks later, nothing would release them."""

    async def main() -> None:
        worker = lone_worker(num_blocks=8)
        sink = worker.sink

        await sink.reserve(offer_of(worker, "first", 1))
        waiting = asyncio.create_task(sink.reserve(offer_of(worker, "second", 2)))
        request = asyncio.create_task(sink.claim("second"))
        await asyncio.sleep(1)
        request.cancel()
        await asyncio.sleep(1)
        assert waiting.done()
        with pytest.raises(TransferError, match="cancelled"):
            await waiting
        sink.abort("first", "its sender went away")
        await asyncio.sleep(60)
        assert worker.check() == []

    run_virtually(main)


def test_an_abandoned_transfer_gives_its_room_to_a_waiting_one():
    async def main() -> None:
        worker = lone_worker(num_blocks=8)
        await worker.sink.reserve(offer_of(worker, "first", 1))
        waiting = asyncio.create_task(worker.sink.reserve(offer_of(worker, "second", 2)))
        await asyncio.sleep(1)
        assert not waiting.done()
        worker.sink.abandon("first")
        await asyncio.sleep(1)
        assert waiting.done()
        worker.sink.abandon("second")
        assert worker.sink.num_active == 0

    run_virtually(main)
