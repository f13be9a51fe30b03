"""Grammars with every speculation method: answers are always valid, and equal to those without speculation."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from baton.core.chunk_budget import SchedulerLimits
from baton.core.request import FinishReason, Request, SamplingParams
from baton.core.roles import DRAFT_METHODS
from baton.engine.engine import Engine
from baton.engine.kv_cache.block_manager import BlockManager
from baton.engine.models.model_loader import prepare_model
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.runner.options import RunnerOptions
from baton.engine.scheduling.scheduler import Scheduler
from baton.grammar.compiler import GrammarCompiler
from baton.grammar.forms import json_grammar
from cluster.config.worker_config import SpeculationConfig
from decode_worker.speculation.registry import GRAMMAR, create_controller
from decode_worker.speculation.verification import create_verifier
from tests.drafting import prompts
from tests.method_drafts import CHAINS, DRAWN, TREES, draft_for
from tests.random_schemas import EOS, json_tokenizer, random_schema
from tests.tiny_drafts import VOCAB, tiny_target

TOKENIZER = json_tokenizer()
GRAMMARS = GrammarCompiler(TOKENIZER.to_json, VOCAB, {EOS})
_BATCH = 8


class Lab:
    """A tiny model, with a draft for some method, that answers requests with schemas."""

    def __init__(self, method: str, config: SpeculationConfig, folder: Path) -> None:
        loaded = prepare_model(tiny_target(), "float32")
        draft = draft_for(method, loaded, folder)
        network = None if draft is None else draft.network
        self.runner = ModelRunner(loaded, 512, 4, RunnerOptions(decoder="transformers"), draft=network)
        # The engine learns costs in a model of its own, so that drafts do not depend on how fast this machine is.
        self.controller = create_controller(config, self.runner, draft, default=method)
        self.config = config

    def answers(self, schemas: Sequence[Mapping[str, Any]], method: str | None = None) -> list[Request]:
        """A greedy and a sampled answer for each schema; every one is valid."""
        engine = Engine(
            self.runner,
            Scheduler(SchedulerLimits(32, _BATCH, 127), BlockManager(512, 4)),
            create_verifier(self.config.acceptance),
            self.controller,
            max_draft_tokens=8,
        )
        requests = [
            Request(
                str(index),
                list(prompt),
                SamplingParams(max_tokens=120, temperature=index % 2, seed=index, grammar=json_grammar(schema)),
                frozenset({EOS}),
                arrival_s=index,
                speculation_method=method,
            )
            for index, (schema, prompt) in enumerate((schema, prompt) for schema in schemas for prompt in prompts(3, 5))
        ]
        for request in requests:
            request.grammar = GRAMMARS.compile(request.params.grammar)
            engine.scheduler.add(request)
        while engine.scheduler.has_work():
            engine.step()
        assert engine.scheduler.blocks.check([]) == []
        assert self.controller.num_failures == 0
        for request, schema in zip(requests, (schema for schema in schemas for _ in range(2)), strict=True):
            assert request.finish_reason is FinishReason.STOP
            jsonschema.validate(json.loads(TOKENIZER.decode(request.output_token_ids)), schema)
        return requests


def _schemas(count: int) -> list[dict[str, Any]]:
    chance = random.Random(7)
    return [random_schema(chance) for _ in range(count)]


COUNTS = [12, pytest.param(1000, marks=pytest.mark.thorough(covered_by="[12-"))]
METHODS: Mapping[str, tuple[str, SpeculationConfig]] = {
    "ngram": ("ngram", CHAINS),
    "suffix": ("suffix", CHAINS),
    "lookahead": ("lookahead", TREES),
    "eagle3 chains": ("eagle3", CHAINS),
    "eagle3 trees": ("eagle3", TREES),
    "medusa": ("medusa", TREES),
    "draft model": ("draft_model", CHAINS),
    "auto": ("auto", TREES),
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("count", COUNTS)
def test_answers_are_valid_and_do_not_depend_on_the_method(name: str, count: int, tmp_path: Path) -> None:
    method, config = METHODS[name]
    lab = Lab(method, config, tmp_path)
    schemas = _schemas(count)
    plain = lab.answers(schemas, "none")
    assert not any(own.num_drafts for own in lab.controller.figures.by_method.values())
    drafted = lab.answers(schemas)
    assert [request.output_token_ids for request in drafted] == [request.output_token_ids for request in plain]
    assert lab.controller.figures.by_method[GRAMMAR].num_accepted > 0
    if method in (*DRAFT_METHODS, "lookahead"):  # the others find little to repeat in such short answers
        assert lab.controller.figures.by_method[method].num_drafts > 0


@pytest.mark.parametrize("method", ["eagle3", "draft_model"])
@pytest.mark.parametrize("count", COUNTS)
def test_answers_are_valid_with_drafts_that_are_drawn(method: str, count: int, tmp_path: Path) -> None:
    lab = Lab(method, DRAWN, tmp_path)
    lab.answers(_schemas(count))
    assert lab.controller.figures.by_method[method].num_drafts > 0
