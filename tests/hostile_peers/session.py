"""Two workers under hostile calls: every answer is judged, and a right request must get the right tokens after them."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import psutil
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from baton.engine.draft.eagle.eagle_checkpoint import load_eagle
from baton.engine.draft.loading import LoadedDraft
from tests.engine_runs import greedy
from tests.hostile_peers.calls import HostileCall, Material, RawBytes, hostile_calls
from tests.hostile_peers.peer import HostilePeer, hostile_peer, problem
from tests.integration.worker_pair import Runners, WorkerPair, pair_config, worker_pair
from tests.tiny_drafts import tiny_eagle3, tiny_target

PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], list(range(40, 62)), list(range(1, 70)))
"""Prompts of the hostile peer."""
_RIGHT_PROMPT = list(range(90, 60, -1))
_NUM_BLOCKS = 128
_CALLS_AT_ONCE = 6
_BATCHES_PER_SEED = 20
_SHORT_S = 0.05
"""How long the workers wait for what hostile peers never send; for right requests they have time on a busy machine."""
_LONG_S = 60.0


class Session:
    """Workers that serve, and the calls that they have answered. Made by :func:`hostile_session`.

    Attributes:
        answers: number of calls by method and answer.
        num_calls: number of calls, connections with raw bytes included.
        num_messages: number of messages in these calls.
    """

    def __init__(
        self, runner: asyncio.Runner, pair: WorkerPair, peer: HostilePeer, material: Material, errors: ErrorLog
    ) -> None:
        self._runner = runner
        self._pair = pair
        self._peer = peer
        self._material = material
        self._errors = errors
        self._expected = runner.run(self._right_answer())
        self.answers: Counter[tuple[str, str]] = Counter()
        self.num_calls = 0
        self.num_messages = 0

    def run(self, num_calls: int, first_seed: int = 0) -> None:
        """Makes at least ``num_calls`` calls.

        Raises AssertionError at the first wrong answer, error in the log, or leak.

        Args:
            first_seed: every :data:`_BATCHES_PER_SEED` batches use another seed; errors have it as a note.
        """
        end = self.num_calls + num_calls
        for number in itertools.count(first_seed):
            try:
                self._run_batches(number)
            except BaseException as error:
                error.add_note(f"with the seed {number}")
                raise
            if self.num_calls >= end:
                return

    def _run_batches(self, number: int) -> None:
        @seed(number)
        @settings(
            max_examples=_BATCHES_PER_SEED,
            database=None,
            deadline=None,
            derandomize=False,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(st.data())
        def send(data: st.DataObject) -> None:
            # Hypothesis wants data that depend on its draws alone: at least their length must.
            ids = [f"call-{self.num_calls:09}-{letter}" for letter in "ab"]
            calls = st.lists(hostile_calls(self._material, ids), min_size=1, max_size=_CALLS_AT_ONCE)
            self._runner.run(self._batch(data.draw(calls)))

        send()
        self._runner.run(self._pair.settle())  # no block, reservation or lease is left

    async def _batch(self, calls: list[HostileCall]) -> None:
        _wait_for_peers(self._pair, _SHORT_S)
        answers = await self._peer.send(calls)
        _wait_for_peers(self._pair, _LONG_S)
        for call, answer in zip(calls, answers, strict=True):
            method = "raw bytes" if isinstance(call, RawBytes) else call.method
            self.answers[method, answer.name] += 1
            self.num_calls += 1
            self.num_messages += call.num_messages
            assert (wrong := problem(call, answer)) is None, (wrong, call)
        assert await self._right_answer() == self._expected, calls
        assert not self._errors.lines, (self._errors.lines, calls)

    @property
    def memory_mb(self) -> float:
        """Resident memory of this process, which is that of both workers and of the hostile peer."""
        return float(psutil.Process().memory_info().rss) / 1e6

    async def _right_answer(self) -> list[int]:
        """What the workers answer a request that is not hostile."""
        answer = await self._pair.generate(_RIGHT_PROMPT, greedy(8))
        return answer.token_ids


def _wait_for_peers(pair: WorkerPair, seconds: float) -> None:
    """Sets how long the running workers wait for each other."""
    decode, prefill = pair.decode.role, pair.prefill.role
    decode._importer._imports._claim_timeout_s = seconds
    decode._kv_service._silence_s = decode._kv_service._longest_wait_s = 4 * seconds
    prefill._exporter._reserve_timeout_s = seconds
    prefill._transport._timeout_s = 4 * seconds


class ErrorLog(logging.Handler):
    """Collects the log's errors of all libraries, those of gRPC and asyncio included."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@contextmanager
def hostile_session(folder: Path) -> Iterator[Session]:
    """Starts a prefill and a decode worker with tiny weights and a draft.

    Args:
        folder: where the draft is written.
    """
    path, errors = tiny_eagle3().write(folder / "draft"), ErrorLog()

    def load(target: PreTrainedModel) -> LoadedDraft:
        return LoadedDraft("eagle3", "tiny", load_eagle(path, target, torch.float32, torch.device("cpu")))

    async def enter(stack: AsyncExitStack) -> tuple[WorkerPair, HostilePeer, Material]:
        pair = await stack.enter_async_context(worker_pair(runners, config))
        peer = await stack.enter_async_context(hostile_peer(pair))
        return pair, peer, await peer.record(PROMPTS)

    runners = Runners.with_drafts(tiny_target(), load, load, _NUM_BLOCKS)
    waits = dict.fromkeys(("claim_timeout_s", "reserve_timeout_s", "transfer_timeout_s"), _LONG_S)
    config = pair_config(kv_transfer={"encoding": "auto", **waits})
    logging.getLogger().addHandler(errors)
    try:
        with asyncio.Runner() as runner:
            stack = AsyncExitStack()
            pair, peer, material = runner.run(enter(stack))
            try:
                yield Session(runner, pair, peer, material, errors)
            finally:
                runner.run(stack.aclose())
    finally:
        logging.getLogger().removeHandler(errors)
