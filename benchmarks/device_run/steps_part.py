"""Steps of a model of random weights in the shape of a real one, split into host, graph and eager.

A step that is short of its target is a figure, not a failure of the run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.ceilings import Ceilings
from benchmarks.device_run.ceilings_part import ceilings_of
from benchmarks.device_run.kernel_tables import kernel_rows
from benchmarks.device_run.part import Row, Setting
from benchmarks.device_run.random_model import DTYPES, fill_randomly, make_model
from benchmarks.device_run.random_steps import StepTimer, StepTimes, blocks_needed
from benchmarks.device_run.timing import WatchedRecorder
from benchmarks.engine_steps import Case, Work
from engine.model_loader import prepare_model
from engine.model_runner import ModelRunner

BLOCK_SIZE = 16
_RESERVED_BYTES = 14 * 2**30
"""Of the card: for activations, logits and graphs."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured.

    Attributes:
        batches, contexts: of decode steps, all with all; the first context is the one that has targets.
        prefill: tokens of a prompt in one step; the last but one has a target.
        verify: tokens of a chain.
        plan_tokens: length of a sequence that graphs have room for, as a deployment has it.
        budget_s: for each of a step's times.
    """

    batches: tuple[int, ...] = (1, 64, 8, 256)
    contexts: tuple[int, ...] = (1024, 8192)
    prefill: tuple[int, ...] = (128, 1024, 8192, 32768)
    verify: int = 8
    plan_tokens: int = 32768
    budget_s: float = 0.4

    @property
    def cases(self) -> list[Case]:
        """Those with targets first, the longest last."""
        decode = [Case(batch, 1, context) for context in self.contexts for batch in self.batches]
        chain, (*prompts, longest) = Case(1, self.verify, self.contexts[0]), (Case(1, n, 0) for n in self.prefill)
        return [*decode[:2], chain, *prompts, *decode[2:], longest]


TINY = Sizes((1, 3, 2), (32, 48), (16, 48, 64), 4, 128, 0.01)


def run(setting: Setting) -> Iterator[Row]:
    """A row for each step, figures with targets, tables of kernels, and what recording graphs took."""
    sizes = TINY if setting.is_tiny else Sizes()
    ceilings = ceilings_of(setting)
    loaded = prepare_model(make_model(setting.shape, setting.device), DTYPES[setting.shape])
    recorder = WatchedRecorder() if setting.device.type == "cuda" else None
    wanted = max(blocks_needed(case, BLOCK_SIZE) for case in sizes.cases)
    spec = loaded.kv_spec(BLOCK_SIZE)
    num_blocks = min(wanted, room_in_blocks(setting.device, BLOCK_SIZE * spec.bytes_per_token))
    runner = ModelRunner(loaded, num_blocks, BLOCK_SIZE, decoder="transformers", recorder=recorder)
    fill_randomly(runner.cache)
    yield _capture(runner, max(sizes.batches), sizes.verify - 1, sizes.plan_tokens)
    timer = StepTimer(runner, recorder, sizes.budget_s)
    work = Work(loaded, runner.spec.bytes_per_token)
    found: dict[Case, StepTimes] = {}
    for case in sizes.cases:
        if setting.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        times = found[case] = timer.times(case)
        yield _step_row(case, times, work.least_ms(case, ceilings), setting.device)
    yield from _figures(sizes, found, work, ceilings)
    for case in (*(Case(batch, 1, sizes.contexts[0]) for batch in sizes.batches[:2]), Case(1, sizes.prefill[-2], 0)):
        plan = timer.plan(case)
        batch = runner.build_batch(plan)
        replay = timer.replay(plan)
        yield from kernel_rows(replay or partial(timer.eager, batch), case.name, setting.device)
    # The same without room for long sequences: what the size of the plan alone costs.
    short = [Case(batch, 1, sizes.contexts[0]) for batch in sizes.batches[:2]]
    yield _capture(runner, max(case.batch for case in short), 0, sizes.contexts[0] + BLOCK_SIZE)
    for case in short:
        row = _step_row(case, timer.times(case), work.least_ms(case, ceilings), setting.device)
        yield {**row, "name": f"{case.name}, plan of {sizes.contexts[0] + BLOCK_SIZE}"}


def room_in_blocks(device: torch.device, block_bytes: int) -> int:
    """Blocks that the card has room for beside what is in it; on the CPU, a GiB of them."""
    if device.type != "cuda":
        return 2**30 // block_bytes
    torch.cuda.empty_cache()
    return (torch.cuda.mem_get_info(device)[0] - _RESERVED_BYTES) // block_bytes


def _capture(runner: ModelRunner, max_num_seqs: int, max_draft_tokens: int, max_model_len: int) -> Row:
    started_s = time.perf_counter()
    before = _allocated_gib(runner.device)
    runner.capture_graphs(max_num_seqs, max_draft_tokens, max_model_len)
    runner.wait_for_device()
    return {
        "name": f"recording graphs for sequences of {max_model_len}",
        "num_graphs": runner.num_graphs,
        "s": time.perf_counter() - started_s,
        "gib": _allocated_gib(runner.device) - before,
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


def _figures(sizes: Sizes, found: dict[Case, StepTimes], work: Work, ceilings: Ceilings) -> Iterator[Row]:
    """Those that have targets, of whole steps to tokens on the host."""
    lone, many = (Case(batch, 1, sizes.contexts[0]) for batch in sizes.batches[:2])
    prompt, chain = Case(1, sizes.prefill[-2], 0), Case(1, sizes.verify, sizes.contexts[0])
    wanted = zip((lone, many, prompt), ("bandwidth", "bandwidth", "matrix rate"), (0.85, 0.70, 0.60), strict=True)
    for case, of, target in wanted:
        value = work.least_ms(case, ceilings) / found[case].full
        yield {
            "name": f"{case.name}: share of the {of}",
            "value": value,
            "target": f"≥ {target}",
            "met": value >= target,
        }
    value = found[chain].full / found[lone].full
    yield {"name": f"{chain.name}: times a token", "value": value, "target": "≤ 1.1", "met": value <= 1.1}


def _allocated_gib(device: torch.device) -> float:
    return torch.cuda.memory_reserved(device) / 2**30 if device.type == "cuda" else 0.0
