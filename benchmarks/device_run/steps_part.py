"""Measures steps of a model with random weights in the shape of a real model, split into host, graph and eager.

A step that misses its target does not fail the run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from baton.engine.models.model_loader import prepare_model
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.runner.options import RunnerOptions
from benchmarks.device_run.ceilings_part import ceilings_of
from benchmarks.device_run.part import Row, Setting
from benchmarks.device_run.random_model import DTYPES, fill_randomly, make_model
from benchmarks.device_run.random_steps import StepTimer, StepTimes, blocks_needed
from benchmarks.device_run.timing import WatchedRecorder, kernel_rows
from benchmarks.engine_steps import Case, Work

BLOCK_SIZE = 16
_RESERVED_BYTES = 14 * 2**30
"""Memory of the card that is kept free for activations, logits and graphs."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of the measured steps.

    Attributes:
        batches, contexts: every combination is a decode step. The first context has targets.
        prefill: tokens of a prompt in one step. The last but one has a target.
        verify: tokens of a chain.
        plan_tokens: maximum sequence length of the graphs, as in a deployment.
        budget_s: seconds for each figure of a step.
    """

    batches: tuple[int, ...] = (1, 64, 8, 256)
    contexts: tuple[int, ...] = (1024, 8192)
    prefill: tuple[int, ...] = (128, 1024, 8192, 32768)
    verify: int = 8
    plan_tokens: int = 32768
    budget_s: float = 0.4

    @property
    def cases(self) -> list[Case]:
        """All cases, beginning with those that have targets and ending with the longest."""
        decode = [Case(batch, 1, context) for context in self.contexts for batch in self.batches]
        chain, (*prompts, longest) = Case(1, self.verify, self.contexts[0]), (Case(1, n, 0) for n in self.prefill)
        return [*decode[:2], chain, *prompts, *decode[2:], longest]


TINY = Sizes((1, 3, 2), (32, 48), (16, 48, 64), 4, 128, 0.01)


def run(setting: Setting) -> Iterator[Row]:
    """Yields a row for each step, figures with targets, tables of kernels, and the cost of capturing graphs."""
    sizes = TINY if setting.is_tiny else Sizes()
    ceilings = ceilings_of(setting)
    loaded = prepare_model(make_model(setting.shape, setting.device), DTYPES[setting.shape])
    recorder = WatchedRecorder() if setting.device.type == "cuda" else None
    wanted = max(blocks_needed(case, BLOCK_SIZE) for case in sizes.cases)
    spec = loaded.kv_spec(BLOCK_SIZE)
    num_blocks = min(wanted, room_in_blocks(setting.device, BLOCK_SIZE * spec.bytes_per_token))
    runner = ModelRunner(loaded, num_blocks, BLOCK_SIZE, RunnerOptions(decoder="transformers"), recorder=recorder)
    fill_randomly(runner.cache)
    before_gib = _reserved_gib(setting.device)
    yield _capture(runner, max(sizes.batches), sizes.verify - 1, sizes.plan_tokens, before_gib)
    timer = StepTimer(runner, recorder, sizes.budget_s)
    work = Work(loaded, runner.spec.bytes_per_token)
    full_ms: dict[Case, float] = {}
    for case in sizes.cases:
        if setting.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        try:
            times = timer.times(case)
        except torch.OutOfMemoryError as error:
            yield {"name": case.name, "ok": False, "error": f"{type(error).__name__}: {error}"}
            continue
        full_ms[case], least_ms = times.full, work.least_ms(case, ceilings)
        yield _step_row(case, times, least_ms, setting.device)
        yield from _figure(case, sizes, full_ms, least_ms)
    for case in (*(Case(batch, 1, sizes.contexts[0]) for batch in sizes.batches[:2]), Case(1, sizes.prefill[-2], 0)):
        plan = timer.plan(case)
        batch = runner.build_batch(plan)
        replay = timer.replay(plan)
        yield from kernel_rows(replay or partial(timer.eager, batch), case.name, setting.device)
    yield from _short_plans(runner, timer, sizes, before_gib)


def _short_plans(runner: ModelRunner, timer: StepTimer, sizes: Sizes, before_gib: float) -> Iterator[Row]:
    """Measures steps with graphs for short sequences, which shows the cost of the plan's size."""
    length = sizes.contexts[0] + BLOCK_SIZE
    cases = [Case(batch, 1, sizes.contexts[0]) for batch in sizes.batches[:2]]
    yield _capture(runner, max(case.batch for case in cases), 0, length, before_gib)
    for case in cases:
        times = timer.times(case)
        yield {"name": f"{case.name}, plan of {length}", "full_ms": times.full, "replay_ms": times.replay}


def room_in_blocks(device: torch.device, block_bytes: int) -> int:
    """The number of blocks that fit into the card's free memory; on the CPU, into 1 GiB."""
    if device.type != "cuda":
        return 2**30 // block_bytes
    torch.cuda.empty_cache()
    return (torch.cuda.mem_get_info(device)[0] - _RESERVED_BYTES) // block_bytes


def _capture(
    runner: ModelRunner, max_num_seqs: int, max_draft_tokens: int, max_model_len: int, before_gib: float
) -> Row:
    """Captures graphs and yields a row with the cost.

    Args:
        before_gib: reserved memory without graphs.
    """
    started_s = time.perf_counter()
    runner.capture_graphs(max_num_seqs, max_draft_tokens, max_model_len)
    runner.wait_for_device()
    return {
        "name": f"recording graphs for sequences of {max_model_len}",
        "num_graphs": runner.num_graphs,
        "s": time.perf_counter() - started_s,
        "gib": _reserved_gib(runner.device) - before_gib,
        "kv_gib": runner.cache.num_blocks * BLOCK_SIZE * runner.spec.bytes_per_token / 2**30,
    }


def _step_row(case: Case, times: StepTimes, least_ms: float, device: torch.device) -> Row:
    return {
        "name": case.name,
        "full_ms": times.full,
        "host_ms": times.host,
        "replay_ms": times.replay,
        "eager_ms": times.eager,
        "ahead_ms": times.ahead,
        "limit_ms": least_ms,
        "of_limit": least_ms / times.full,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None,
    }


def _figure(case: Case, sizes: Sizes, full_ms: Mapping[Case, float], least_ms: float) -> Iterator[Row]:
    """Yields the figure of a case that has a target. Steps last until the tokens are on the host."""
    lone, many = (Case(batch, 1, sizes.contexts[0]) for batch in sizes.batches[:2])
    prompt, chain = Case(1, sizes.prefill[-2], 0), Case(1, sizes.verify, sizes.contexts[0])
    shares = {lone: ("bandwidth", 0.85), many: ("bandwidth", 0.70), prompt: ("matrix rate", 0.60)}
    if case in shares:
        of, target = shares[case]
        value = least_ms / full_ms[case]
        name, met = f"{case.name}: share of the {of}", value >= target
        yield {"name": name, "value": value, "target": f"≥ {target}", "met": met}
    elif case == chain and lone in full_ms:
        value = full_ms[chain] / full_ms[lone]
        yield {"name": f"{chain.name}: times a token", "value": value, "target": "≤ 1.1", "met": value <= 1.1}


def _reserved_gib(device: torch.device) -> float:
    return torch.cuda.memory_reserved(device) / 2**30 if device.type == "cuda" else 0.0
