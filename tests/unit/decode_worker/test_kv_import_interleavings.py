"""Many transfers at once over few blocks, everybody giving up at random: what arrives is right, and nothing leaks."""

from __future__ import annotations

import asyncio
import random

import pytest

from baton.core.errors import BatonError
from baton.engine.runner.model_runner import ModelRunner
from baton.kv_transfer.codec import checksum
from tests.kv_receiver import Receiver, SourceKV, running_receiver
from tests.tiny_models import random_prompts

NUM_TRANSFERS = 24
PREFIXES = random_prompts((0, 16, 24), seed=1)


class Party:
    """The sender and the claimer of one transfer, and their luck."""

    def __init__(self, receiver: Receiver, index: int, chance: random.Random) -> None:
        self._receiver = receiver
        self._importer = receiver.importer
        self._chance = chance
        self._id = f"transfer-{index}"
        prompt = chance.choice(PREFIXES) + [chance.randrange(3, 160) for _ in range(chance.randint(1, 30))]
        self._source = SourceKV(receiver.spec, prompt, seed=index)

    async def _pause(self) -> None:
        for _ in range(self._chance.choice((0, 0, 0, 1, 3))):
            await asyncio.sleep(0)
        if self._chance.random() < 0.1:
            await asyncio.sleep(self._chance.random() * 0.01)

    async def send(self) -> None:
        """What the gRPC service does with a stream, the giving up included."""
        deadline_s = self._chance.choice((0.0, 0.02, 1.0))
        cached = (await self._importer.reserve(self._source.offer(self._id, deadline_s))).num_cached_tokens
        committed = False
        try:
            for header, payload in self._source.parts(cached, part_bytes=self._chance.choice((200, 900, 10_000))):
                await self._pause()
                if self._chance.random() < 0.02:
                    return
                await self._importer.write(self._id, header, memoryview(payload), checksum(payload))
            await self._pause()
            await self._importer.commit(self._id)
            committed = True
        finally:
            if not committed:
                self._importer.abort(self._id, "the sender gave up")

    async def claim(self) -> None:
        await self._pause()
        imported = await self._importer.claim(self._id)
        try:
            holder = imported.holder
            assert holder is not None
            assert holder.prompt_token_ids == self._source.token_ids
            await self._pause()
        finally:
            self._importer.release(imported)

    async def run(self) -> None:
        tasks = [asyncio.create_task(self.send()), asyncio.create_task(self.claim())]
        for task in tasks:
            if self._chance.random() < 0.3:
                await self._pause()
                task.cancel()
        if self._chance.random() < 0.3:
            await self._pause()
            self._importer.abandon(self._id)
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception) and not isinstance(result, BatonError):
                raise result


@pytest.mark.parametrize("seed", range(12))
async def test_random_interleavings_leak_nothing(receiver_runner: ModelRunner, seed: int) -> None:
    chance = random.Random(seed)
    async with running_receiver(receiver_runner, claim_timeout_s=0.3) as receiver:
        parties = [Party(receiver, index, chance) for index in range(NUM_TRANSFERS)]

        async def start(party: Party) -> None:
            await asyncio.sleep(chance.random() * 0.05)
            await party.run()

        await asyncio.gather(*(start(party) for party in parties))
        await receiver.all_given_back()
        # Whatever luck they had, which goes by the clock too: who comes next is served.
        source = SourceKV(receiver.spec, random_prompts((21,), seed=3)[0], seed=NUM_TRANSFERS)
        cached = (await receiver.importer.reserve(source.offer("last"))).num_cached_tokens
        for header, payload in source.parts(cached):
            await receiver.importer.write("last", header, memoryview(payload), checksum(payload))
        await receiver.importer.commit("last")
        imported = await receiver.importer.claim("last")
        assert await receiver.read(imported) == source.layers
        receiver.importer.release(imported)
        await receiver.all_given_back()


async def test_concurrent_transfers_with_a_common_prefix_do_not_interfere(
    receiver_runner: ModelRunner,
) -> None:
    prompt = random_prompts((21,), seed=2)[0]
    async with running_receiver(receiver_runner) as receiver:
        importer = receiver.importer
        first, second = SourceKV(receiver.spec, prompt, seed=1), SourceKV(receiver.spec, prompt, seed=1)
        for name in ("first", "second"):
            assert (await importer.reserve(first.offer(name))).num_cached_tokens == 0
        for (header, payload), (_, same) in zip(first.parts(), second.parts(), strict=True):
            await importer.write("first", header, memoryview(payload), checksum(payload))
            await importer.write("second", header, memoryview(same), checksum(same))
        await importer.commit("second")
        importer.abort("first", "the other one was quicker")
        imported = await importer.claim("second")
        assert await receiver.read(imported) == second.layers
        importer.release(imported)
        await receiver.all_given_back()
