"""Every method on the real model in float32: greedy answers are, token for token, those of plain decoding, and their
rounds are what was drafted and accepted."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from baton.core.chunk_budget import SchedulerLimits
from baton.core.request import Request, SamplingParams, TokenOutput
from baton.engine.draft.loading import LoadedDraft, load_draft
from baton.engine.engine import Engine
from baton.engine.kv_cache.block_manager import BlockManager
from baton.engine.models.model_loader import LoadedModel, load_model
from baton.engine.models.model_source import resolve_model
from baton.engine.models.tokenizer import Tokenizer
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.scheduling.scheduler import Scheduler
from cluster.config.worker_config import SpeculationConfig
from decode_worker.speculation.registry import create_controller
from decode_worker.speculation.verification import create_verifier
from tests.witness import Witness

NUM_TOKENS = 32
QUESTIONS = (
    "Repeat this sentence three times: The quick brown fox jumps over the lazy dog.",
    "Write a Python function that adds two numbers.",
    "What is the capital of France?",
    "Count from one to twenty.",
    "Tell me a short story about a sailor and a storm.",
)


class Lab:
    """The default model twice: a draft ties a model to its cache, so each draft gets a copy of its own."""

    def __init__(self) -> None:
        self.source = resolve_model("default")
        tokenizer = Tokenizer.load(self.source.path)
        self.prompts = [
            tokenizer.apply_chat_template([{"role": "user", "content": question}]) for question in QUESTIONS
        ]
        self.plain = self.run(self.load(), None, "none", SpeculationConfig(tree_max_batch=0))[0]

    def load(self) -> LoadedModel:
        return load_model(self.source, "float32", torch.device("cpu"))

    def run(
        self, model: LoadedModel, draft: LoadedDraft | None, method: str, limits: SpeculationConfig
    ) -> tuple[list[list[int]], int]:
        """Answers, and how many drafts were accepted. Every third request forbids speculation.

        Requests are traced if there is a method, and their rounds are checked.
        """
        network = None if draft is None else draft.network
        runner = ModelRunner(model, 128, 16, draft=network)
        blocks = BlockManager(128, 16)
        scheduler = Scheduler(SchedulerLimits(512, 8, 1024), blocks)
        controller = create_controller(limits, runner, draft, default=method)
        engine = Engine(runner, scheduler, create_verifier(), controller, max_draft_tokens=32)
        requests: Sequence[Request] = [
            Request(
                str(index),
                list(prompt),
                SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True),
                speculation_method="none" if index % 3 == 2 else None,
                arrival_s=index,
                is_traced=method != "none",
            )
            for index, prompt in enumerate(self.prompts)
        ]
        witness = Witness(engine)
        for request in requests:
            scheduler.add(request)
        outputs: list[TokenOutput] = []
        while scheduler.has_work():
            outputs += engine.step()
        for request in requests:
            if request.is_traced:
                witness.check(request.request_id, outputs, request.output_token_ids)
        assert blocks.check([]) == []
        assert controller.num_failures == 0
        return [request.output_token_ids for request in requests], sum(output.num_accepted for output in outputs)


@pytest.fixture(scope="module")
def lab() -> Lab:
    return Lab()


@pytest.mark.parametrize("method", ["ngram", "suffix", "lookahead"])
def test_tokens_match_plain_decoding_without_a_draft(lab: Lab, method: str) -> None:
    answers, accepted = lab.run(lab.load(), None, method, SpeculationConfig(tree_max_batch=0))
    assert answers == lab.plain
    assert accepted > 0


@pytest.mark.parametrize(
    ("method", "limits", "least_accepted"),
    [
        ("eagle3", SpeculationConfig(max_draft_tokens=4, tree_max_batch=0), 21),
        ("eagle3", SpeculationConfig(max_tree_tokens=12, tree_max_batch=8), 21),
        ("medusa", SpeculationConfig(max_tree_tokens=12), 12),
        ("draft_model", SpeculationConfig(max_draft_tokens=4, tree_max_batch=0), 12),
        # Goes by what steps take here and now, and may rightly find that nothing pays.
        ("auto", SpeculationConfig(max_tree_tokens=12, tree_max_batch=8), 0),
    ],
    ids=["chains", "trees", "medusa", "draft-model", "auto"],
)
def test_tokens_match_plain_decoding_with_a_bundled_draft(
    lab: Lab, method: str, limits: SpeculationConfig, least_accepted: int
) -> None:
    model = lab.load()
    draft = load_draft("auto", "default", lab.source.path, model, method)
    assert draft is not None
    answers, accepted = lab.run(model, draft, method, limits)
    assert answers == lab.plain
    assert accepted >= least_accepted


def test_tokens_match_plain_decoding_with_a_draft_model(lab: Lab) -> None:
    """The model as its own draft, which is right nearly always: what remains is rounding."""
    model = lab.load()
    draft = load_draft("default", "default", lab.source.path, model)
    assert draft is not None
    answers, accepted = lab.run(model, draft, "draft_model", SpeculationConfig(max_draft_tokens=4, tree_max_batch=0))
    assert answers == lab.plain
    assert accepted > 50
