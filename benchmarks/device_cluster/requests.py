"""The requests of a device run, and the answers of the engine alone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from baton.core.chunk_budget import SchedulerLimits
from baton.core.request import Request, SamplingParams
from baton.engine.async_engine import AsyncEngine, generate_all
from baton.engine.models.model_loader import load_model
from baton.engine.models.model_source import resolve_model
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.runner.options import RunnerOptions

_BLOCK_SIZE = 16
_CHUNK_TOKENS = 512
_MAX_NUM_SEQS = 16
DECODER = "transformers"
"""The decoder; on a CPU, compiling the fused decoder would take minutes."""


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request: the prompt's token ids, the number of tokens to generate, and a seed; ``None`` means greedy."""

    prompt: tuple[int, ...]
    max_tokens: int
    seed: int | None

    def body(self, model: str) -> dict[str, Any]:
        """The body of an OpenAI completion request."""
        sampling = {"temperature": 0} if self.seed is None else {"temperature": 1.0, "seed": self.seed}
        return {
            "model": model,
            "prompt": list(self.prompt),
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            "return_token_ids": True,
            **sampling,
        }

    @property
    def params(self) -> SamplingParams:
        """The request's parameters for the engine."""
        if self.seed is None:
            return SamplingParams(max_tokens=self.max_tokens, temperature=0.0, ignore_eos=True)
        return SamplingParams(max_tokens=self.max_tokens, temperature=1.0, seed=self.seed, ignore_eos=True)


def make_requests(count: int, longest: int, max_tokens: int, vocab_size: int, seed: int = 0) -> list[PlannedRequest]:
    """Requests with random prompts of 1 to ``longest`` tokens, including both; every other request is sampled."""
    rng = random.Random(seed)
    lengths = [longest, 1, *(rng.randint(1, longest) for _ in range(count - 2))][:count]
    return [
        PlannedRequest(
            tuple(rng.randrange(vocab_size) for _ in range(length)), max_tokens, index if index % 2 else None
        )
        for index, length in enumerate(lengths)
    ]


async def answers_of_one_engine(
    folder: Path, dtype: str, device: torch.device, asked: Sequence[PlannedRequest]
) -> list[list[int]]:
    """The tokens of a single engine, without hand-off and speculation."""
    loaded = load_model(resolve_model(str(folder)), dtype, device)
    longest = max(len(each.prompt) + each.max_tokens for each in asked)
    runner = ModelRunner(
        loaded, len(asked) * (-(-longest // _BLOCK_SIZE) + 1), _BLOCK_SIZE, RunnerOptions(decoder=DECODER)
    )
    engine = AsyncEngine(runner, SchedulerLimits(_CHUNK_TOKENS, _MAX_NUM_SEQS, loaded.max_model_len))
    engine.start()
    try:
        requests = [Request(str(index), list(each.prompt), each.params) for index, each in enumerate(asked)]
        return await asyncio.gather(*(generate_all(engine, request) for request in requests))
    finally:
        await engine.stop()
