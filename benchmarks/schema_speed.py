"""What a JSON schema costs and gains in tokens per second: ``python -m benchmarks.schema_speed``.

The default model's engine answers the same prompts in three ways, one after the other in every round: without a schema,
with one, and with one whose forced tokens are drafts. Rates are medians over the rounds; ratios are medians of the
rounds' own ratios.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from baton.core.chunk_budget import SchedulerLimits
from baton.core.request import Request, SamplingParams
from baton.engine.engine import Engine
from baton.engine.kv_cache.block_manager import BlockManager
from baton.engine.models.model_loader import load_model
from baton.engine.models.model_source import resolve_model
from baton.engine.models.tokenizer import Tokenizer
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.scheduling.scheduler import Scheduler
from baton.grammar.compiler import GrammarCompiler
from baton.grammar.forms import json_grammar
from baton.process.worker_environment import become_like_a_worker
from benchmarks.options import at_least
from cluster.config.worker_config import SpeculationConfig
from decode_worker.speculation.controller import NONE
from decode_worker.speculation.registry import GRAMMAR, create_controller
from decode_worker.speculation.verification import create_verifier

_BLOCK_SIZE = 16
_SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "first_name": {"type": "string", "maxLength": 16},
            "family_name": {"type": "string", "maxLength": 16},
            "year_of_birth": {"type": "integer", "minimum": 1900, "maximum": 2020},
            "occupation": {"enum": ["teacher", "sailor", "engineer", "musician"]},
        },
        "required": ["first_name", "family_name", "year_of_birth", "occupation"],
        "additionalProperties": False,
    },
    "minItems": 100,
}
"""A list of records that no answer completes, so that all answers have as many tokens."""
_PLAIN, _SCHEMA_ONLY, _FORCED = "no schema", "schema", "schema, forced tokens as drafts"


class Lab:
    """The default model's engine with the methods of a decode worker."""

    def __init__(self, num_tokens: int) -> None:
        source = resolve_model("default")
        self._num_tokens = num_tokens
        self._tokenizer = Tokenizer.load(source.path)
        loaded = load_model(source, "auto", torch.device("cpu"))
        self._runner = ModelRunner(loaded, 4096, _BLOCK_SIZE)
        self._grammars = GrammarCompiler(self._tokenizer.to_json, loaded.vocab_size, loaded.eos_token_ids)
        self._num_requests = 0

    def rate(self, way: str, batch: int) -> float:
        """Tokens per second of ``batch`` answers that run together."""
        controller = create_controller(SpeculationConfig(), self._runner, None, default=NONE)
        scheduler = Scheduler(SchedulerLimits(2048, batch, 4096), BlockManager(4096, _BLOCK_SIZE))
        engine = Engine(
            self._runner, scheduler, create_verifier(), controller, max_draft_tokens=8, costs=controller.costs
        )
        requests = [self._request(way, number) for number in range(batch)]
        for request in requests:
            scheduler.add(request)
        begun_s = time.perf_counter()
        while scheduler.has_work():
            engine.step()
        return sum(len(request.output_token_ids) for request in requests) / (time.perf_counter() - begun_s)

    def _request(self, way: str, number: int) -> Request:
        prompt = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": f"List {number + 20} people with name, year of birth and occupation as JSON."}]
        )
        has_schema = way != _PLAIN
        params = SamplingParams(
            max_tokens=self._num_tokens,
            temperature=0,
            ignore_eos=not has_schema,
            grammar=json_grammar(_SCHEMA) if has_schema else "",
        )
        self._num_requests += 1
        request = Request(
            str(self._num_requests), prompt, params, speculation_method=GRAMMAR if way == _FORCED else NONE
        )
        if has_schema:
            request.grammar = self._grammars.compile(params.grammar)
        return request


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=at_least(1), nargs="+", default=[1, 4, 16], help="answers at the same time")
    parser.add_argument("--tokens", type=at_least(1), default=96, help="per answer")
    parser.add_argument("--rounds", type=at_least(1), default=5)
    options = parser.parse_args()
    become_like_a_worker()
    lab, console = Lab(options.tokens), Console(width=120)
    ways: Sequence[str] = (_PLAIN, _SCHEMA_ONLY, _FORCED)
    table = Table("answers at once", *(f"{way} (tokens/s)" for way in ways), "schema ratio", "forced ratio", box=None)
    for batch in options.batches:
        lab.rate(_FORCED, batch)  # the engine's first steps are slower
        rounds = [{way: lab.rate(way, batch) for way in ways} for _ in range(options.rounds)]
        rates = [f"{median(found[way] for found in rounds):.1f}" for way in ways]
        ratios = [f"{median(found[way] / found[_PLAIN] for found in rounds):.2f}" for way in ways[1:]]
        table.add_row(str(batch), *rates, *ratios)
    console.print(table)


if __name__ == "__main__":
    main()
