"""Checks that bytes and tokens stay correct when KV moves between two caches while both engines compute.

Wrongly ordered streams are seldom noticed on a fast device, so every copy and every step begins with a random delay.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from baton.core.request import Request
from baton.engine.engine import Engine
from baton.engine.kv_cache.kv_copies import CopyQueue, CudaCopyQueue, WatchedCopies, WorkMark
from baton.engine.kv_cache.paged_cache import PagedKVCache
from baton.engine.models.model_loader import LoadedModel, prepare_model
from baton.engine.runner.model_runner import ModelRunner
from benchmarks.device_run.architecture_checks import make_runner
from benchmarks.device_run.part import Row
from tests.engine_runs import build_engine, greedy
from tests.late_copies import LateCopies
from tests.tiny_models import model_with_reference, random_prompts

_LENGTHS = (61, 5, 17, 9, 26)
_TRAVELLER, _NUM_AT_SENDER = 0, 3
"""The first prompt's KV is sent. The sender computes it and the next two prompts, the receiver the others."""
_NUM_TOKENS = 20
_MAX_STEPS_BEHIND = 6
"""Steps of the sender between the end of the prompt and the receiver's first step; fewer than the generated tokens."""
_CHUNK_TOKENS = 16
_NUM_THREADS = 3
_MAX_CYCLES = 1_000_000


class SlowCopies:
    """Wraps a ``CopyQueue`` so that each copy begins with a delay on the device."""

    def __init__(self, queue: CopyQueue, delay: Callable[[], None]) -> None:
        self._queue = queue
        self._delay = delay
        self.mark, self.host_memory, self.join = queue.mark, queue.host_memory, queue.join
        self.backlog, self.wait = queue.backlog, queue.wait

    def fetch(self, copy: Callable[[], None], after: WorkMark) -> None:
        self._queue.fetch(lambda: self._delayed(copy), after)

    def bring(self, copy: Callable[[], None], after: WorkMark, num_bytes: int) -> WorkMark:
        return self._queue.bring(lambda: self._delayed(copy), after, num_bytes)

    def _delayed(self, copy: Callable[[], None]) -> None:
        self._delay()
        copy()


@dataclass(slots=True)
class _Part:
    """Positions ``[start, end)`` of some layers in transit."""

    start: int
    end: int
    layers: range
    arriving: Future[tuple[bytes, WorkMark | None]]


@dataclass(slots=True)
class Interleaving:
    """One hand-off between two engines that also compute, in an order chosen by a seed.

    Attributes:
        expected: each prompt's tokens.
    """

    sender: ModelRunner
    receiver: ModelRunner
    prompts: Sequence[Sequence[int]]
    expected: Sequence[Sequence[int]]
    seed: int
    _chance: random.Random = field(init=False)
    _parts: list[_Part] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self._chance = random.Random(self.seed)

    def run(self) -> Row:
        """Runs the hand-off; the row is right when all bytes and tokens are."""
        own = self._requests(range(_NUM_AT_SENDER), "sender")
        others = self._requests(range(_NUM_AT_SENDER, len(self.prompts)), "receiver")
        engines = self._engine(self.sender, own), self._engine(self.receiver, others)
        traveller = own[_TRAVELLER]
        moved = Request("moved", list(self.prompts[_TRAVELLER]), greedy(_NUM_TOKENS))
        moved.num_computed_tokens = len(moved.prompt_token_ids) - 1
        engines[1].scheduler.blocks.grow(moved, moved.num_tokens)
        free_after = self.receiver.cache.mark()
        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            sent = steps_behind = 0
            wanted_behind = self._chance.randint(0, _MAX_STEPS_BEHIND)
            while sent < moved.num_computed_tokens or steps_behind < wanted_behind:
                engine = engines[self._chance.random() < 0.5]
                self._delay()
                engine.step()
                steps_behind += engine is engines[0] and sent == moved.num_computed_tokens
                computed = min(traveller.num_computed_tokens, moved.num_computed_tokens)
                if computed > sent:
                    self._send(pool, (traveller, moved), sent, computed, free_after)
                    sent = computed
            arrived = [part.arriving.result() for part in self._parts]
        wrong = self._wrong_parts(traveller, moved, [data for data, _ in arrived], [mark for _, mark in arrived])
        engines[1].scheduler.add(moved)
        for engine in engines:
            while engine.scheduler.has_work():
                self._delay()
                engine.step()
        found = {request: self.expected[index] for index, request in enumerate((*own, *others))}
        found[moved] = self.expected[_TRAVELLER]
        other_tokens = [request.request_id for request, right in found.items() if request.output_token_ids != right]
        errors = [f"part {each}" for each in wrong] + [f"tokens of {name}" for name in other_tokens]
        row = {"name": f"interleaving {self.seed}", "ok": not errors, "parts": len(self._parts)}
        return {**row, "error": f"differs: {', '.join(errors)}"} if errors else row

    def _requests(self, indices: range, place: str) -> list[Request]:
        return [
            Request(f"{index} at {place}", list(self.prompts[index]), greedy(_NUM_TOKENS), arrival_s=index)
            for index in indices
        ]

    def _engine(self, runner: ModelRunner, requests: Sequence[Request]) -> Engine:
        engine = build_engine(runner, chunk_tokens=_CHUNK_TOKENS, prefix_caching=False)
        for request in requests:
            engine.scheduler.add(request)
        return engine

    def _send(
        self,
        pool: ThreadPoolExecutor,
        requests: tuple[Request, Request],
        start: int,
        end: int,
        free_after: WorkMark | None,
    ) -> None:
        """Cuts new positions into parts of some tokens and layers, which other threads copy."""
        computed = self.sender.cache.mark()
        num_layers = len(self.sender.spec.layers)
        cuts = sorted({start, end, *(self._chance.randint(start, end) for _ in range(2))})
        source, target = (list(request.block_ids) for request in requests)
        for first, behind in pairwise(cuts):
            middle = self._chance.randint(0, num_layers)
            for layers in (range(middle), range(middle, num_layers)):
                if len(layers):
                    arriving = pool.submit(self._copy, source, target, first, behind, layers, computed, free_after)
                    self._parts.append(_Part(first, behind, layers, arriving))

    def _copy(
        self,
        source: list[int],
        target: list[int],
        start: int,
        end: int,
        layers: range,
        computed: WorkMark | None,
        free_after: WorkMark | None,
    ) -> tuple[bytes, WorkMark | None]:
        data = self.sender.cache.export_bytes(source, start, end, layers, after=computed)
        brought = self.receiver.cache.import_bytes(target, start, end, layers, data, after=free_after)
        return bytes(data), brought

    def _wrong_parts(
        self, traveller: Request, moved: Request, sent: Sequence[bytes], brought: Sequence[WorkMark | None]
    ) -> list[str]:
        """The parts whose bytes differ from the sender's cache, or from the receiver's cache after a join."""
        for mark in brought:
            self.receiver.cache.join(mark)
        wrong = []
        for part, data in zip(self._parts, sent, strict=True):
            place = part.start, part.end, part.layers
            at_sender = bytes(self.sender.cache.export_bytes(traveller.block_ids, *place))
            at_receiver = bytes(self.receiver.cache.export_bytes(moved.block_ids, *place))
            if not data == at_sender == at_receiver:
                wrong.append(f"[{part.start}, {part.end}) of layers {part.layers.start} to {part.layers.stop - 1}")
        return wrong

    def _delay(self) -> None:
        delay_device(self.sender.device, self._chance)


def delay_device(device: torch.device, chance: random.Random) -> None:
    """Keeps the current stream busy for up to about 0.5 ms, in half of the calls."""
    if device.type == "cuda" and chance.random() < 0.5:
        torch.cuda._sleep(chance.randrange(_MAX_CYCLES))  # type: ignore[no-untyped-call]


def check_interleavings(count: int, device: torch.device, seed: int = 0) -> Iterator[Row]:
    """Yields a row for each interleaving. The caches are filled with NaN before, so that missing KV is noticed."""
    prompts = random_prompts(_LENGTHS)
    model, expected = model_with_reference("llama", prompts, _NUM_TOKENS, device)
    loaded = prepare_model(model, "float32")
    chance = random.Random(seed)
    sender, receiver = (_runner(loaded, chance) for _ in range(2))
    for index in range(count):
        yield Interleaving(sender, receiver, prompts, expected, seed * count + index).run()


def _runner(loaded: LoadedModel, chance: random.Random) -> ModelRunner:
    """A runner with delayed copies. On the CPU, imported KV arrives only when the engine joins it."""
    runner = make_runner(loaded, "off")
    device = runner.device
    if device.type == "cuda":
        copies: CopyQueue = SlowCopies(CudaCopyQueue(device), lambda: delay_device(device, chance))
    else:
        copies = LateCopies()
    _replace_copies(runner.cache, copies)
    return runner


def _replace_copies(cache: PagedKVCache, copies: CopyQueue) -> None:
    cache._copies = WatchedCopies(copies, lambda error: cache.on_copy_error(error))
