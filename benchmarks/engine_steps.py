"""What one engine step costs, by batch and by tokens per sequence: ``python -m benchmarks.engine_steps [--help]``.

More than one token per sequence is what verifying drafts costs. Medians; the machine should do nothing else.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import torch
from rich.console import Console
from rich.table import Table

from engine.block_manager import BlockManager
from engine.drafts import Draft
from engine.model_loader import load_model, pick_device
from engine.model_runner import ModelRunner
from engine.model_source import resolve_model
from engine.request import Request, SamplingParams
from engine.scheduler import ScheduledSequence

_BLOCK_SIZE = 16


def measure_ms(runner: ModelRunner, batch: int, tokens: int, context: int, repeats: int) -> float:
    """Median milliseconds of a step: ``batch`` sequences, each with ``tokens`` new tokens behind ``context`` others."""
    blocks = BlockManager(runner.cache.num_blocks, _BLOCK_SIZE, prefix_caching=False)
    plan = []
    for index in range(batch):
        request = Request(str(index), [7] * (context + 1), SamplingParams(max_tokens=tokens + 1))
        blocks.grow(request, context + tokens)
        request.num_computed_tokens = context
        plan.append(ScheduledSequence(request, 1, Draft((5,) * (tokens - 1))))
    times = []
    for _ in range(repeats + 2):
        started_s = time.perf_counter()
        runner.forward(runner.build_batch(plan)).argmax(-1).tolist()
        times.append((time.perf_counter() - started_s) * 1e3)
    return statistics.median(times[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--context", type=int, default=256, help="tokens before the step")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    loaded = load_model(resolve_model(arguments.model), arguments.dtype, pick_device(arguments.device))
    most = max(arguments.batches) * -(-(arguments.context + max(arguments.tokens)) // _BLOCK_SIZE)
    runner = ModelRunner(loaded, most, _BLOCK_SIZE)
    table = Table("batch", *(f"{tokens} tokens" for tokens in arguments.tokens))
    for batch in arguments.batches:
        row = [measure_ms(runner, batch, tokens, arguments.context, arguments.repeats) for tokens in arguments.tokens]
        table.add_row(str(batch), *(f"{ms:.1f}" for ms in row))
    console = Console()
    console.print(f"milliseconds a step, {loaded.dtype_name}, context {arguments.context}, {arguments.threads} threads")
    console.print(table)


if __name__ == "__main__":
    main()
