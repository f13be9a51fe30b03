"""Two engines over one fake device of :mod:`tests.device_tensors`, and the hand-off between them.

The exporter, the importer and the engines are the real ones. Their threads take turns in a seeded random order: between
steps, between rounds of the event loop, and whenever one of them waits for the device. So a case can be repeated.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from transformers import PreTrainedModel

from baton.core.chunk_budget import SchedulerLimits
from baton.core.request import Request, SamplingParams
from baton.engine.async_engine import AsyncEngine, generate_all
from baton.engine.attention import backends as registry
from baton.engine.models.model_loader import prepare_model
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.runner.options import RunnerOptions
from baton.engine.step.overlap import AheadRule
from baton.kv_transfer.base import PartBuffer, PartHeader, Payload, Pieces
from baton.kv_transfer.codec import checksum
from baton.kv_transfer.payload.in_process import InProcessKVTransport, InProcessSendStream
from benchmarks.device_run.attention_world import poison
from decode_worker.kv_import import KVImporter
from prefill_worker.kv_export import KVExporter
from tests.device_tensors import DeviceTensors, handle_of
from tests.kernel_attention import KernelAttention
from tests.stream_checker import Device

BLOCK_SIZE = 4
MAX_NUM_SEQS = 4
_ROUNDS = 3
_WAITS = (0, 10, 100)


class Turns:
    """Lets one of several threads run at a time; the next one is chosen at random when a thread passes its turn on."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self._changed = threading.Condition()
        self._names = [threading.current_thread().name]
        self._whose = self._names[0]

    @contextmanager
    def taking_part(self) -> Iterator[None]:
        """A context for a thread that :meth:`start` started, which begins with its first turn."""
        name = threading.current_thread().name
        with self._changed:
            self._changed.wait_for(lambda: self._whose == name)
        try:
            yield
        finally:
            with self._changed:
                self._names.remove(name)
                self._pass_to_any()

    def start(self, thread: threading.Thread) -> None:
        self._names.append(thread.name)
        thread.start()

    def pass_on(self) -> None:
        """Passes the turn on, and returns when it is this thread's turn again."""
        name = threading.current_thread().name
        with self._changed:
            self._pass_to_any()
            self._changed.wait_for(lambda: self._whose == name)

    def wait(self) -> None:
        """Passes the turn on a random number of times, for a thread that waits for the device."""
        for _ in range(self.chance.choice(_WAITS)):
            self.pass_on()

    def _pass_to_any(self) -> None:
        self._whose = self.chance.choice(self._names)
        self._changed.notify_all()


class TurnTaking(asyncio.SelectorEventLoop):
    """An event loop that takes turns, and runs executor jobs itself some rounds later."""

    def __init__(self, turns: Turns) -> None:
        super().__init__()
        self.turns = turns

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        future = self.create_future()

        def run(rounds: int) -> None:
            if rounds:
                self.call_soon(run, rounds - 1)
                return
            try:
                result = func(*args)
            except BaseException as error:  # noqa: BLE001 - the waiting caller gets it
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(result)

        self.call_soon(run, self.turns.chance.randrange(_ROUNDS))
        return future


class _Placing(InProcessKVTransport):
    """Writes every other part to memory that the receiver provides, as over a TCP connection."""

    async def open(self, offer: Any, peer: str) -> InProcessSendStream:
        stream = await super().open(offer, peer)
        send, parts = stream.send, [0]

        async def send_or_place(header: PartHeader, payload: Payload | Pieces | PartBuffer) -> None:
            parts[0] += 1
            place = stream._sink.place(offer.transfer_id, header, len(payload)) if parts[0] % 2 else None
            if place is None:
                await send(header, payload)
                return
            assert isinstance(payload, Payload)
            place.views[0][:] = payload
            await asyncio.sleep(0)
            place.check()
            await place.filled(checksum(payload), checksum(payload))
            stream._num_bytes += len(payload)

        stream.send = send_or_place  # type: ignore[method-assign]
        return stream


@dataclass(slots=True)
class Handoff:
    """A prefill engine with its exporter, and a decode engine with its importer."""

    prefill: AsyncEngine
    decode: AsyncEngine
    exporter: KVExporter
    importer: KVImporter

    async def generate(
        self, name: str, prompt: Sequence[int], params: SamplingParams, gives_up_at: int | None
    ) -> list[int]:
        """Runs a request; returns its tokens.

        Args:
            gives_up_at: number of tokens after which to abort: 1 aborts during the transfer, more during decoding.
        """
        request = Request(name, list(prompt), params, hands_off=True)
        transfer = self.exporter.start(request, name, "decode", {})
        tokens: list[int] = []
        try:
            async with aclosing(self.prefill.generate(request)) as outputs:
                async for output in outputs:
                    tokens += output.token_ids
            if gives_up_at == 1:
                return tokens
            imported = await self.importer.claim(name)
            try:
                behind = Request(name, list(prompt), params, output_token_ids=list(tokens))
                adopting = self.decode.generate(behind, lambda adopted: self.importer.hand_over(imported, adopted))
                async with aclosing(adopting) as outputs:
                    async for output in outputs:
                        tokens += output.token_ids
                        if len(tokens) == gives_up_at:
                            break
            finally:
                self.importer.release(imported)
            await transfer
            return tokens
        finally:
            transfer.cancel()
            await asyncio.gather(transfer, return_exceptions=True)
            if gives_up_at == 1:
                self.importer.abandon(name)

    async def generate_alone(self, name: str, prompt: Sequence[int], params: SamplingParams) -> list[int]:
        """Runs a request on the decode worker alone; returns its tokens."""
        return await generate_all(self.decode, Request(name, list(prompt), params))

    async def settle(self) -> None:
        """Waits until both workers are idle, then checks that every block is free or cached."""
        while self.exporter.num_active or self.importer.num_active or self.prefill.blocks.pool.leases:  # noqa: ASYNC110
            await asyncio.sleep(0)
        for worker in (self.prefill, self.decode):
            assert await worker.call(lambda worker=worker: worker.blocks.check(worker.scheduler.requests)) == []


def device_runner(
    tensors: DeviceTensors, model: PreTrainedModel, num_blocks: int, *, graphs: bool = False, **settings: Any
) -> ModelRunner:
    """Moves a model to the device in the current stream; it is computed as on CUDA, as far as possible."""
    loaded = prepare_model(model, "float32")
    tensors.take_over(loaded.model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry._BACKENDS, "kernel", lambda cache: KernelAttention(cache, tensors))
        recorder = tensors.device if graphs else None
        options = RunnerOptions("kernel", "transformers", cuda_graphs="auto" if graphs else "off")
        runner = ModelRunner(loaded, num_blocks, BLOCK_SIZE, options, recorder=recorder, **settings)
    poison(runner.cache)
    if graphs:
        runner.capture_graphs(MAX_NUM_SEQS, 0, runner.loaded.max_model_len)
    return runner


@asynccontextmanager
async def handoff(
    prefill: ModelRunner,
    decode: ModelRunner,
    turns: Turns,
    *,
    chunk_tokens: int,
    part_bytes: int,
    runs_ahead: AheadRule,
) -> AsyncIterator[Handoff]:
    """A hand-off between two engines. Use it in a :class:`TurnTaking` loop."""
    engines = [_engine(runner, chunk_tokens, runs_ahead) for runner in (prefill, decode)]
    importer = KVImporter(engines[1], 60.0)
    exporter = KVExporter(engines[0], _Placing({"decode": importer}), part_bytes, 60.0)
    ended = threading.Event()
    threads = [
        threading.Thread(target=_drive, args=(engine, turns, ended), name=f"engine-{number}")
        for number, engine in enumerate(engines)
    ]
    for thread in threads:
        turns.start(thread)
    device = device_of(prefill)
    passing, device.on_wait = asyncio.create_task(_pass_on(turns)), turns.wait
    try:
        yield Handoff(engines[0], engines[1], exporter, importer)
    finally:
        passing.cancel()
        device.on_wait = lambda: None
        ended.set()
        while any(thread.is_alive() for thread in threads):
            turns.pass_on()


def device_of(runner: ModelRunner) -> Device:
    return handle_of(runner.cache.keys[0]).tensors.device


def _engine(runner: ModelRunner, chunk_tokens: int, runs_ahead: AheadRule) -> AsyncEngine:
    limits = SchedulerLimits(chunk_tokens, MAX_NUM_SEQS, runner.loaded.max_model_len)
    engine = AsyncEngine(runner, limits, runs_ahead=runs_ahead)
    engine._loop = asyncio.get_running_loop()
    return engine


async def _pass_on(turns: Turns) -> None:
    while True:
        turns.pass_on()
        await asyncio.sleep(0)


def _drive(engine: AsyncEngine, turns: Turns, ended: threading.Event) -> None:
    """The work of an engine's thread."""
    with turns.taking_part(), device_of(engine.runner).stream(handle_of(engine.runner.cache.keys[0]).stream):
        while not ended.is_set():
            engine._thread._take_mail(wait=False)
            outputs = engine._engine.step()
            if outputs:
                engine._deliver(outputs)
            turns.pass_on()
