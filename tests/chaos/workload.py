"""The requests that clients send during faults, and the tokens that a single engine answers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoTokenizer

from baton.core.request import SamplingParams
from baton.engine.models.default_model import ensure_default_model
from baton.engine.models.model_loader import load_model
from baton.engine.models.model_source import resolve_model
from baton.engine.runner.model_runner import ModelRunner
from tests.e2e.varied_prompts import varied_prompts
from tests.engine_runs import build_engine, run, tokens_of
from tests.running_cluster import MODEL

_NUM_TOKENS = 40
_LONGEST_PROMPT = 400
_TEMPERATURE = 0.9
_METHODS = ("auto", "eagle3", "suffix", "lookahead", "none")
_CACHED_SHARE = 0.2
"""Share of the requests that may reuse cached prefixes. The others would otherwise hardly have prompts to compute."""


@dataclass(frozen=True, slots=True)
class Question:
    """A request whose answer is known.

    Attributes:
        temperature: 0 for a greedy answer.
        expected: the tokens of the answer.
    """

    prompt: Sequence[int]
    temperature: float
    seed: int
    expected: Sequence[int]

    def body(self, chance: random.Random) -> dict[str, Any]:
        """The request as JSON. Chance decides what must not change the tokens: drafts and cached prefixes."""
        salt = {} if chance.random() < _CACHED_SHARE else {"cache_salt": f"{chance.getrandbits(64):x}"}
        return {
            "model": MODEL,
            "prompt": list(self.prompt),
            "max_tokens": len(self.expected),
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            "temperature": self.temperature,
            "seed": self.seed,
            "speculation": {"method": chance.choice(_METHODS)},
            **salt,
        }


def questions(num_prompts: int) -> list[Question]:
    """A greedy and a sampled request for each prompt, answered by a single engine in this process.

    Args:
        num_prompts: the last so many of the varied prompts that are not longer than 400 tokens.
    """
    tokenizer = AutoTokenizer.from_pretrained(ensure_default_model())
    tokenized: list[list[int]] = [tokenizer(text).input_ids for text in varied_prompts()]
    prompts = [prompt for prompt in tokenized if len(prompt) <= _LONGEST_PROMPT][-num_prompts:]
    model = load_model(resolve_model(MODEL), "float32", torch.device("cpu"))
    twice = [prompt for prompt in prompts for _ in range(2)]
    params = [
        SamplingParams(max_tokens=_NUM_TOKENS, temperature=_TEMPERATURE * (number % 2), seed=number, ignore_eos=True)
        for number in range(len(twice))
    ]
    engine = build_engine(ModelRunner(model, num_blocks=512, block_size=16), max_num_seqs=16)
    answers = tokens_of(run(engine, twice, params))
    return [
        Question(prompt, own.temperature, own.seed, answer)
        for prompt, own, answer in zip(twice, params, answers, strict=True)
    ]
