"""The requests that clients send during faults, and the tokens that a single engine answers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from baton.core.request import SamplingParams
from baton.engine.models.default_model import ensure_default_model
from baton.engine.models.model_loader import load_model
from baton.engine.models.model_source import resolve_model
from baton.engine.models.tokenizer import Tokenizer
from baton.engine.runner.model_runner import ModelRunner
from baton.grammar.compiler import GrammarCompiler
from baton.grammar.forms import json_grammar
from tests.e2e.varied_prompts import varied_prompts
from tests.engine_runs import build_engine, run, tokens_of
from tests.running_cluster import MODEL

_NUM_TOKENS = 40
_LONGEST_PROMPT = 400
_TEMPERATURE = 0.9
_METHODS = ("auto", "eagle3", "suffix", "lookahead", "none")
_SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "maximum": 120}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "minItems": 30,
}
"""No document of it is complete after 40 tokens."""
_CACHED_SHARE = 0.2
"""Share of the requests that may reuse cached prefixes. The others would otherwise hardly have prompts to compute."""


@dataclass(frozen=True, slots=True)
class Question:
    """A request whose answer is known.

    Attributes:
        temperature: 0 for a greedy answer.
        has_schema: whether the answer keeps to a JSON schema.
        expected: the tokens of the answer.
    """

    prompt: Sequence[int]
    temperature: float
    seed: int
    has_schema: bool
    expected: Sequence[int]

    def body(self, chance: random.Random) -> dict[str, Any]:
        """The request as JSON. Chance decides what must not change the tokens: drafts and cached prefixes."""
        salt = {} if chance.random() < _CACHED_SHARE else {"cache_salt": f"{chance.getrandbits(64):x}"}
        return {
            "model": MODEL,
            "prompt": list(self.prompt),
            "max_tokens": len(self.expected),
            **({"guided_json": _SCHEMA} if self.has_schema else {"ignore_eos": True}),
            "stream": True,
            "return_token_ids": True,
            "temperature": self.temperature,
            "seed": self.seed,
            "speculation": {"method": chance.choice(_METHODS)},
            **salt,
        }


def questions(num_prompts: int) -> list[Question]:
    """A greedy and a sampled request for each prompt, answered by a single engine in this process. Every third prompt
    has a schema.

    Args:
        num_prompts: the last so many of the varied prompts that are not longer than 400 tokens.
    """
    tokenizer = Tokenizer.load(ensure_default_model())
    tokenized = [tokenizer.encode(text) for text in varied_prompts()]
    prompts = [prompt for prompt in tokenized if len(prompt) <= _LONGEST_PROMPT][-num_prompts:]
    model = load_model(resolve_model(MODEL), "float32", torch.device("cpu"))
    twice = [prompt for prompt in prompts for _ in range(2)]
    params = [_params(number, has_schema=number // 2 % 3 == 0) for number in range(len(twice))]
    engine = build_engine(ModelRunner(model, num_blocks=512, block_size=16), max_num_seqs=16)
    grammars = GrammarCompiler(tokenizer.to_json, model.vocab_size, model.eos_token_ids)
    answers = tokens_of(run(engine, twice, params, grammars))
    return [
        Question(prompt, own.temperature, own.seed, bool(own.grammar), answer)
        for prompt, own, answer in zip(twice, params, answers, strict=True)
    ]


def _params(number: int, *, has_schema: bool) -> SamplingParams:
    grammar, temperature = json_grammar(_SCHEMA) if has_schema else "", _TEMPERATURE * (number % 2)
    return SamplingParams(
        max_tokens=_NUM_TOKENS, temperature=temperature, seed=number, ignore_eos=not has_schema, grammar=grammar
    )
