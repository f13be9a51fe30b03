"""A prompt's true KV leaves the prefill worker exactly once, whatever the scheduler does; no lease outlives it."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import torch

from baton.core.chunk_budget import SchedulerLimits
from baton.core.errors import BatonError, LayoutMismatchError, OutOfBlocksError, TransferError
from baton.core.request import FinishReason, Request
from baton.core.timeline import Event
from baton.engine.async_engine import AsyncEngine
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.step.overlap import AheadRule, always, never
from baton.kv_transfer.base import KVSendStream, PartHeader, Payload, Reservation, TransferOffer
from baton.kv_transfer.payload.in_process import InProcessKVTransport
from baton.kv_transfer.payload.shared_memory import SegmentMappings, SharedMemorySendPath
from prefill_worker.encoding_choice import EncodingChoice
from prefill_worker.kv_export import ExportSummary, KVExporter
from tests.engine_runs import BLOCK_SIZE, greedy
from tests.kv_receiver import Receiver, read_layers, running_receiver
from tests.observers import CallOn
from tests.tiny_models import random_prompts
from tests.unit.baton.kv_transfer.links import kv_server, slots_free, transport_over
from tests.waiting import TIMEOUT_S

CHUNK = 8
PROMPT = random_prompts((45,))[0]


@dataclass(slots=True)
class Sender:
    """A prefill engine with its exporter."""

    engine: AsyncEngine
    exporter: KVExporter
    peer: str = "receiver"
    events: dict[Event, float] = field(default_factory=dict)

    async def run(self, request: Request, transfer_id: str = "transfer-1") -> ExportSummary:
        """Computes the prompt and hands it over, as the service does."""
        transfer = self.exporter.start(request, transfer_id, self.peer, self.events)
        try:
            reasons = [output.finish_reason async for output in self.engine.generate(request)]
            assert reasons == [FinishReason.HANDED_OFF]
            return await transfer
        finally:
            transfer.cancel()
            await asyncio.gather(transfer, return_exceptions=True)

    async def begun(self) -> None:
        """Waits for the first event of the transfer."""
        async with asyncio.timeout(TIMEOUT_S):
            while not self.events:  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    async def all_given_back(self) -> None:
        usage = await self.engine.call(self.engine.blocks.usage)
        assert usage.used == 0
        assert await self.engine.call(lambda: self.engine.blocks.pool.leases) == {}
        assert await self.engine.call(lambda: self.engine.blocks.pool.check([])) == []
        assert self.exporter.num_active == 0


@asynccontextmanager
async def sending(
    runner: ModelRunner,
    transport: object,
    *,
    part_bytes: int = 1000,
    prefix_caching: bool = True,
    peer: str = "receiver",
    choice: EncodingChoice | None = None,
    runs_ahead: AheadRule = never,
) -> AsyncIterator[Sender]:
    limits = SchedulerLimits(CHUNK, 8, runner.loaded.max_model_len)
    engine = AsyncEngine(runner, limits, prefix_caching=prefix_caching, num_threads=1, runs_ahead=runs_ahead)
    exporter = KVExporter(engine, transport, part_bytes, 1.0, choice=choice)  # type: ignore[arg-type]
    engine.start()
    try:
        yield Sender(engine, exporter, peer)
    finally:
        await engine.stop()


def prompt_request(name: str = "request-1", prompt: list[int] = PROMPT) -> Request:
    request = Request(name, list(prompt), greedy(4))
    request.hands_off = True
    return request


async def true_kv(runner: ModelRunner, prompt: list[int]) -> list[bytes]:
    """What one undisturbed forward puts into the cache."""
    async with sending(runner, InProcessKVTransport({})) as sender:
        request = prompt_request("reference", prompt)
        kept: list[bytes] = []

        def read(plan: object) -> None:
            if request.num_computed_tokens == len(prompt):
                kept.extend(read_layers(runner.cache, request.block_ids, len(prompt)))

        sender.engine.subscribe(CallOn(computed=read))
        async for _ in sender.engine.generate(request):
            pass
    return kept


async def received(receiver: Receiver, transfer_id: str = "transfer-1") -> list[bytes]:
    imported = await receiver.importer.claim(transfer_id)
    layers = await receiver.read(imported)
    receiver.importer.release(imported)
    return layers


def assert_same(got: list[bytes], expected: list[bytes]) -> None:
    """Up to the rounding of other batch shapes."""
    assert len(got) == len(expected)
    for mine, true in zip(got, expected, strict=True):
        assert len(mine) == len(true)
        values = [torch.frombuffer(bytearray(data), dtype=torch.float32) for data in (mine, true)]
        torch.testing.assert_close(*values, rtol=1e-4, atol=1e-5)


async def test_kv_still_being_computed_is_not_in_flight_and_one_thread_waits_for_a_step(
    runner: ModelRunner, receiver_runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where a step's KV is leased when it has been launched."""
    computed_s: dict[int, float] = {}

    def wait(mark: int) -> None:
        assert mark not in computed_s
        time.sleep(0.05)
        computed_s[mark] = time.monotonic()

    marks = itertools.count()
    monkeypatch.setattr(runner.cache, "mark", lambda: next(marks))
    monkeypatch.setattr(runner.cache, "wait", wait)
    half = PROMPT[: CHUNK // 2]
    async with (
        running_receiver(receiver_runner) as receiver,
        sending(runner, InProcessKVTransport({"receiver": receiver.importer})) as sender,
    ):
        first, second = await asyncio.gather(
            sender.run(prompt_request("a", half), "one"), sender.run(prompt_request("b", half[::-1]), "other")
        )
    assert len(computed_s) <= 2
    for summary in (first, second):
        assert min(part.started_s for part in summary.parts) >= min(computed_s.values())


@pytest.mark.parametrize("runs_ahead", [never, always], ids=["waits", "ahead"])
@pytest.mark.parametrize("part_bytes", [1, 500, 1 << 20])
async def test_correct_kv_arrives(
    runner: ModelRunner, receiver_runner: ModelRunner, part_bytes: int, runs_ahead: AheadRule
) -> None:
    expected = await true_kv(runner, PROMPT)
    async with running_receiver(receiver_runner) as receiver:
        transport = InProcessKVTransport({"receiver": receiver.importer})
        async with sending(runner, transport, part_bytes=part_bytes, runs_ahead=runs_ahead) as sender:
            summary = await sender.run(prompt_request())
            assert_same(await received(receiver), expected)
            assert summary.num_bytes == sender.exporter.num_bytes_sent == len(PROMPT) * runner.spec.bytes_per_token
            assert (summary.num_tokens, summary.num_cached_tokens) == (len(PROMPT), 0)
            assert summary.num_parts >= -(-len(PROMPT) // CHUNK)
            order = [Event.TRANSFER_STARTED, Event.TRANSFER_RESERVED, Event.TRANSFER_ACKNOWLEDGED]
            assert list(sender.events) == order
            await sender.all_given_back()
        await receiver.all_given_back()


@pytest.mark.parametrize("part_bytes", [1, 500, 1 << 20])
async def test_correct_kv_arrives_through_shared_memory(
    runner: ModelRunner, receiver_runner: ModelRunner, part_bytes: int
) -> None:
    expected = await true_kv(runner, PROMPT)
    memory = SharedMemorySendPath(1000)  # parts of the largest size do not fit and go in messages
    segment = memory.segment()
    assert segment is not None
    transport = transport_over(memory)
    async with (
        running_receiver(receiver_runner) as receiver,
        kv_server(receiver.importer, SegmentMappings()) as (_, peer),
    ):
        async with sending(runner, transport, part_bytes=part_bytes, peer=peer) as sender:
            summary = await sender.run(prompt_request())
            assert_same(await received(receiver), expected)
            assert summary.num_bytes == len(PROMPT) * runner.spec.bytes_per_token
            fits = CHUNK * runner.spec.bytes_per_token <= segment.layout.slot_bytes or part_bytes < 1 << 20
            assert (summary.num_shared_bytes == summary.num_bytes) == fits
            await sender.all_given_back()
        await slots_free(segment)
        await transport.close()
        await receiver.all_given_back()


@pytest.mark.parametrize("num_steps", [0, 1, 2, 4, 8, 16, 32])
async def test_cancelling_at_any_moment_frees_every_slot(
    runner: ModelRunner, receiver_runner: ModelRunner, num_steps: int
) -> None:
    memory = SharedMemorySendPath(1000)
    segment = memory.segment()
    assert segment is not None
    transport = transport_over(memory)
    async with (
        running_receiver(receiver_runner) as receiver,
        kv_server(receiver.importer, SegmentMappings()) as (_, peer),
    ):
        async with sending(runner, transport, part_bytes=300, peer=peer) as sender:
            running = asyncio.create_task(sender.run(prompt_request()))
            await sender.begun()
            for _ in range(num_steps):
                await asyncio.sleep(0.0005)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await slots_free(segment)
            await sender.all_given_back()
        await transport.close()


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("after_chunks", [1, 2, 3, 5])
async def test_a_prompt_preempted_half_way_arrives_completely(
    runner: ModelRunner, receiver_runner: ModelRunner, prefix_caching: bool, after_chunks: int
) -> None:
    expected = await true_kv(runner, PROMPT)
    async with running_receiver(receiver_runner) as receiver:
        transport = InProcessKVTransport({"receiver": receiver.importer})
        async with sending(runner, transport, prefix_caching=prefix_caching) as sender:
            preempted_at: list[int] = []
            request = prompt_request()

            def preempt(plan: object) -> None:
                if len(preempted_at) < 2 and request.num_computed_tokens == after_chunks * CHUNK:
                    preempted_at.append(request.num_computed_tokens)
                    sender.engine.scheduler._preempt(request)

            # Behind the exporter's own listener, and before the step's results are looked at: like a preemption by
            # the next step. Another request writes to the lost blocks at once.
            sender.engine.subscribe(CallOn(computed=preempt))
            other = prompt_request("other", random_prompts((30,), seed=6)[0])
            summary, _ = await asyncio.gather(sender.run(request), sender.run(other, "transfer-2"))
            assert preempted_at
            assert_same(await received(receiver), expected)
            assert summary.num_bytes == len(PROMPT) * runner.spec.bytes_per_token  # nothing travelled twice
            receiver.importer.release(await receiver.importer.claim("transfer-2"))
            await sender.all_given_back()
        await receiver.all_given_back()


async def test_prompts_cached_on_either_side_arrive_completely(
    runner: ModelRunner, receiver_runner: ModelRunner
) -> None:
    expected = await true_kv(runner, PROMPT)
    async with running_receiver(receiver_runner) as receiver:
        transport = InProcessKVTransport({"receiver": receiver.importer})
        async with sending(runner, transport) as sender:
            await sender.run(prompt_request())
            assert_same(await received(receiver), expected)
            again = await sender.run(prompt_request("request-2"), "transfer-2")
            assert again.num_cached_tokens == len(PROMPT) // BLOCK_SIZE * BLOCK_SIZE
            assert again.num_bytes == (len(PROMPT) % BLOCK_SIZE) * runner.spec.bytes_per_token
            assert_same(await received(receiver, "transfer-2"), expected)
            await sender.all_given_back()

    async with running_receiver(receiver_runner) as receiver:
        transport = InProcessKVTransport({"receiver": receiver.importer})
        async with sending(runner, transport) as sender:
            warm_up = prompt_request("warm-up")
            async for _ in sender.engine.generate(warm_up):
                pass
            summary = await sender.run(prompt_request())
            assert summary.num_bytes == len(PROMPT) * runner.spec.bytes_per_token
            assert_same(await received(receiver), expected)
            await sender.all_given_back()


@pytest.mark.parametrize("stage", ["open", "send", "third send", "commit", "acknowledgement"])
@pytest.mark.parametrize("error", [TransferError("broken"), OutOfBlocksError("full"), LayoutMismatchError("other")])
async def test_every_failure_ends_the_leases_and_notifies_the_receiver(
    runner: ModelRunner, stage: str, error: BatonError
) -> None:
    transport = FailingTransport(stage, error)
    async with sending(runner, transport) as sender:
        with pytest.raises(TransferError if stage == "acknowledgement" else type(error)):
            await sender.run(prompt_request())
        assert transport.aborted == (stage != "open")
        await sender.all_given_back()


@pytest.mark.parametrize("stage", ["queued", "open", "send", "third send", "commit"])
async def test_cancelling_at_any_stage_ends_the_leases_and_notifies_the_receiver(
    runner: ModelRunner, stage: str
) -> None:
    transport = FailingTransport(stage, None)
    async with sending(runner, transport) as sender:
        request = prompt_request()
        if stage == "queued":
            transfer = sender.exporter.start(request, "transfer-1", "receiver", {})
            transfer.cancel()
        else:
            transfer = asyncio.create_task(sender.run(request))
            await asyncio.wait_for(transport.reached.wait(), TIMEOUT_S)
            await asyncio.sleep(0.02)  # the engine goes on and takes more leases
            assert sender.exporter.num_active == 1
            transfer.cancel()
        results = await asyncio.gather(transfer, return_exceptions=True)
        assert isinstance(results[0], asyncio.CancelledError)
        assert transport.aborted == (stage not in ("queued", "open"))
        await asyncio.sleep(0.02)
        await sender.all_given_back()


async def test_room_is_requested_when_the_prompt_leaves_the_queue(runner: ModelRunner) -> None:
    transport = FailingTransport("never", None)
    async with sending(runner, transport) as sender:
        blocks = await sender.engine.call(lambda: sender.engine.blocks.pool.allocate(20))
        running = asyncio.create_task(sender.run(prompt_request()))
        await asyncio.sleep(0.1)
        assert transport.num_opened == 0
        await sender.engine.call(lambda: sender.engine.blocks.pool.release(blocks))
        await running
        assert transport.num_opened == 1
        await sender.all_given_back()


async def test_two_requests_with_one_id_do_not_exchange_kv(runner: ModelRunner, receiver_runner: ModelRunner) -> None:
    """A request may still be leaving the engine when a second attempt of the same name begins."""
    other = random_prompts((45,), seed=7)[0]
    expected = await true_kv(runner, other)
    async with running_receiver(receiver_runner) as receiver:
        transport = InProcessKVTransport({"receiver": receiver.importer})
        async with sending(runner, transport) as sender:
            first = asyncio.create_task(sender.run(prompt_request("same")))
            await sender.begun()
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            await sender.run(prompt_request("same", other), "transfer-2")
            assert_same(await received(receiver, "transfer-2"), expected)
            await sender.all_given_back()


@dataclass(slots=True)
class FailingTransport:
    """Takes everything; at ``stage`` it raises ``error``, or hangs when there is none."""

    stage: str
    error: BatonError | None
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    aborted: bool = False
    num_opened: int = 0
    num_parts: int = 0
    num_bytes: int = 0
    on_acknowledged: Callable[[int], None] | None = None

    @property
    def reservation(self) -> Reservation:
        return Reservation(0)

    async def _at(self, stage: str) -> None:
        if stage == self.stage:
            self.reached.set()
            if self.error is not None:
                raise self.error
            await asyncio.Event().wait()

    async def open(self, offer: TransferOffer, peer: str) -> KVSendStream:
        self.num_opened += 1
        await self._at("open")
        return self

    def buffer(self, num_bytes: int) -> None: ...

    async def send(self, header: PartHeader, payload: Payload) -> None:
        self.num_parts += 1
        self.num_bytes += len(payload)
        await self._at("third send" if self.num_parts == 3 else "send")

    async def commit(self, draft_state: bytes | None = None) -> int:
        await self._at("commit")
        return self.num_bytes - 1 if self.stage == "acknowledgement" else self.num_bytes

    async def abort(self) -> None:
        self.aborted = True

    async def close(self) -> None: ...
