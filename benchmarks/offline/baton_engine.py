"""baton's engine, as a worker has it, without drafts.

``python -m benchmarks.offline.baton_engine FOLDER DTYPE MOST_TOKENS MOST_SEQUENCES WEIGHTS``
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from baton.core.chunk_budget import SchedulerLimits
from baton.core.request import Request, SamplingParams
from baton.engine.engine import Engine
from baton.engine.kv_cache.block_manager import BlockManager
from baton.engine.models.model_loader import pick_device
from baton.engine.models.model_source import resolve_model
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.runner.options import RunnerOptions
from baton.engine.runner.served_model import load_served_model
from baton.engine.scheduling.scheduler import Scheduler
from baton.engine.step.overlap import always, never
from baton.process.cores import usable_cores
from benchmarks.offline.protocol import Generate, serve

_BLOCK_SIZE = 16


def load(folder: Path, dtype: str, max_model_len: int, max_sequences: int, weights: str) -> Generate:
    """Loads the engine.

    Args:
        folder: the model's folder.
        dtype: ``bfloat16`` or ``float32``.
        max_model_len: maximum length of a sequence.
        weights: see ``engine.weights``.
    """
    torch.set_num_threads(usable_cores())
    loaded = load_served_model(resolve_model(str(folder)), dtype, pick_device("cpu"), weights)
    num_blocks = 1 + max_sequences * -(-max_model_len // _BLOCK_SIZE)
    runner = ModelRunner(loaded, num_blocks, _BLOCK_SIZE, RunnerOptions(weights=weights))
    return generate_by(runner, max_model_len, max_sequences)


def generate_by(runner: ModelRunner, max_model_len: int, max_sequences: int) -> Generate:
    """An engine that uses the runner's whole cache.

    Args:
        max_model_len: maximum length of a sequence; a prompt is computed in one step.
        max_sequences: maximum number of concurrent sequences.
    """
    limits = SchedulerLimits(max_sequences * max_model_len, max_sequences, max_model_len)
    blocks = BlockManager(runner.cache.num_blocks, runner.spec.block_size, prefix_caching=False)
    runs_ahead = always if runner.device.type == "cuda" else never  # as workers do
    engine = Engine(runner, Scheduler(limits, blocks), runs_ahead=runs_ahead)

    def generate(prompts: list[list[int]], max_tokens: int) -> list[int]:
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        for index, prompt in enumerate(prompts):
            engine.scheduler.add(Request(str(index), prompt, params))
        counts = [0] * len(prompts)
        num_open = len(prompts)
        while num_open:
            for output in engine.step():
                counts[int(output.request_id)] += len(output.token_ids)
                num_open -= output.finish_reason is not None
        return counts

    return generate


if __name__ == "__main__":
    serve(lambda: load(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]))
