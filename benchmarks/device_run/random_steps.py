"""Measures steps over random tokens and random blocks of the cache, and their parts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from baton.core.drafts import Draft, ScheduledSequence
from baton.core.request import Request, SamplingParams
from baton.engine.batch.batch import ForwardBatch
from baton.engine.runner.forward_pass import TransformersForward
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.sampling.verification import choose_tokens
from benchmarks.device_run.timing import WatchedRecorder, device_ms, host_ms, median_ms, medians
from benchmarks.engine_steps import Case


def blocks_needed(case: Case, block_size: int) -> int:
    """The number of blocks of a batch whose sequences share none."""
    return case.batch * _blocks_of_one(case, block_size)


def random_plan(
    case: Case, num_blocks: int, block_size: int, vocab_size: int, seed: int = 0
) -> list[ScheduledSequence]:
    """The step's sequences, each with its blocks in random order.

    If the cache is too small, sequences share blocks, except those that they write to. A cache that is far larger than
    the device's own caches is still read from memory.
    """
    rng = np.random.default_rng(seed)
    per_sequence = _blocks_of_one(case, block_size)
    num_written = math.ceil((case.tokens + block_size) / block_size)
    shuffled = rng.permutation(num_blocks)
    own, shared = np.split(shuffled, [case.batch * min(per_sequence, num_written)])
    params = SamplingParams(max_tokens=case.tokens + 1, temperature=0, ignore_eos=True)
    plan = []
    for index in range(case.batch):
        if case.batch * per_sequence <= num_blocks:
            blocks = shuffled[index * per_sequence : (index + 1) * per_sequence]
        else:
            tail = own[index * num_written : (index + 1) * num_written]
            blocks = np.concatenate((rng.permutation(shared)[: per_sequence - num_written], tail))
        length = case.context + 1 if case.context else case.tokens
        request = Request(str(index), rng.integers(vocab_size, size=length).tolist(), params)
        request.block_ids = blocks.tolist()
        request.num_computed_tokens = case.context
        if not case.context:
            plan.append(ScheduledSequence(request, case.tokens))
        else:
            draft = tuple(rng.integers(vocab_size, size=case.tokens - 1).tolist())
            plan.append(ScheduledSequence(request, 1, Draft(draft)))
    return plan


def _blocks_of_one(case: Case, block_size: int) -> int:
    return math.ceil((case.context + case.tokens) / block_size)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The median durations of a step and its parts, in milliseconds.

    Attributes:
        full: from building the batch to its tokens on the host, starting on an idle device.
        host: the part of ``full`` until everything is queued on the device.
        replay: the CUDA graph alone, measured by events; ``None`` without a graph for the step.
        eager: the forward without a graph, measured by events.
        ahead: a step whose successor is queued before its tokens are read; ``None`` if drafts are verified.
    """

    full: float
    host: float
    replay: float | None
    eager: float
    ahead: float | None


class StepTimer:
    """Measures steps of one runner.

    Args:
        recorder: the runner's graph recorder; ``None`` on the CPU.
        budget_s: seconds for each figure of a step.
    """

    def __init__(self, runner: ModelRunner, recorder: WatchedRecorder | None, budget_s: float) -> None:
        self._runner = runner
        self._recorder = recorder
        self._budget_s = budget_s
        self._modules = TransformersForward(runner.loaded, runner.backend)

    def plan(self, case: Case) -> list[ScheduledSequence]:
        """A random plan over the runner's cache."""
        spec, vocab_size = self._runner.spec, self._runner.loaded.vocab_size
        return random_plan(case, self._runner.cache.num_blocks, spec.block_size, vocab_size)

    def times(self, case: Case) -> StepTimes:
        """Measures a step. Takes up to five times the budget, and at least one run per figure."""
        runner, device = self._runner, self._runner.device
        plan = self.plan(case)
        runner.wait_for_device()
        full, host = medians(lambda: self._step(plan), self._budget_s)
        batch = runner.build_batch(plan)
        eager = self._median(lambda: device_ms(lambda: self.eager(batch), device))
        replay = self.replay(plan)
        replay_ms = None if replay is None else self._median(lambda: device_ms(replay, device))
        ahead = self._median(_Ahead(runner, plan)) if case.tokens == 1 and case.context else None
        return StepTimes(full, host, replay_ms, eager, ahead)

    @torch.inference_mode()
    def eager(self, batch: ForwardBatch) -> torch.Tensor:
        """The forward without a graph."""
        return self._modules.forward(batch)

    def replay(self, plan: list[ScheduledSequence]) -> Callable[[], None] | None:
        """A function that replays the graph of this step; ``None`` if there is no graph."""
        if self._recorder is None:
            return None
        self._recorder.last_replay = None
        self._step(plan)
        return self._recorder.last_replay

    def _step(self, plan: list[ScheduledSequence]) -> tuple[float, float]:
        """Milliseconds until the tokens are on the host, and until everything is queued."""
        started_s = time.perf_counter()
        logits = self._runner.forward(self._runner.build_batch(plan))
        queued_s = time.perf_counter()
        logits.argmax(-1).tolist()
        return (time.perf_counter() - started_s) * 1e3, (queued_s - started_s) * 1e3

    def _median(self, work: Callable[[], float]) -> float:
        return median_ms(work, self._budget_s)


class _Ahead:
    """Each call queues a step with the previous step's tokens on the device, then reads these tokens.

    ``Engine`` does the same without drafts. A call returns the milliseconds since the last call.
    """

    def __init__(self, runner: ModelRunner, plan: list[ScheduledSequence]) -> None:
        self._runner, self._plan = runner, plan
        batch = runner.build_batch(plan)
        self._chosen = choose_tokens(batch, runner.forward(batch))

    def __call__(self) -> float:
        return host_ms(self._step)

    def _step(self) -> None:
        before = self._chosen
        batch = self._runner.build_batch(self._plan)
        batch.take_tokens([sequence.request for sequence in before.sequences], before.token_ids)
        self._chosen = choose_tokens(batch, self._runner.forward(batch))
        before.read()
