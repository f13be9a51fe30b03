"""Tiny models whose traced requests are run with one speculation method, under a witness of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from baton.core.request import Request, SamplingParams, TokenOutput
from baton.core.rounds import Round
from baton.engine.engine import Engine
from baton.engine.models.model_loader import prepare_model
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.runner.options import RunnerOptions
from cluster.config.worker_config import SpeculationConfig
from decode_worker.speculation.registry import create_controller
from tests.drafting import BLOCK_SIZE, engine_over, prompts
from tests.method_drafts import CHAINS, DRAWN, TREES, draft_for
from tests.tiny_drafts import tiny_target
from tests.witness import Witness

FEW = tuple((token, 60.0) for token in (3, 40, 77))
"""A bias towards few tokens, so that simple guesses are right."""
NUM_TOKENS = 24


class Lab:
    """A tiny model with one method, greedy and sampled requests, and a witness of its engine."""

    def __init__(self, method: str, config: SpeculationConfig, folder: Path, num_blocks: int | None = None) -> None:
        loaded = prepare_model(tiny_target(), "float32")
        draft = draft_for(method, loaded, folder)
        network = None if draft is None else draft.network
        runner = ModelRunner(loaded, 96, BLOCK_SIZE, RunnerOptions(decoder="transformers"), draft=network)
        # The engine learns costs in a model of its own, so that drafts do not depend on how fast this machine is.
        controller = create_controller(config, runner, draft, default=method)
        self.engine = engine_over(runner, controller, num_blocks=num_blocks, acceptance=config.acceptance)
        self.witness = Witness(self.engine)
        self.outputs: list[TokenOutput] = []

    def run(self, requests: Sequence[Request]) -> list[Request]:
        self.outputs = run_all(self.engine, requests)
        return list(requests)

    def check(self, request: Request) -> list[Round]:
        return self.witness.check(request.request_id, self.outputs, request.output_token_ids)


def run_all(engine: Engine, requests: Sequence[Request]) -> list[TokenOutput]:
    for request in requests:
        engine.scheduler.add(request)
    outputs: list[TokenOutput] = []
    while engine.scheduler.has_work():
        outputs += engine.step()
    return outputs


def requests_of(prefix: str, *, traced: bool) -> list[Request]:
    """Greedy and sampled ones in turn."""
    return [
        Request(
            f"{prefix}{index}",
            prompt,
            SamplingParams(max_tokens=NUM_TOKENS, temperature=0.7 * (index % 2), seed=index, logit_bias=FEW),
            arrival_s=index,
            is_traced=traced,
        )
        for index, prompt in enumerate(prompts(5, 9, 14, 21))
    ]


METHODS = [
    *(("suffix", CHAINS), ("ngram", CHAINS), ("lookahead", TREES), ("eagle", CHAINS), ("eagle", TREES)),
    *(("eagle", DRAWN), ("eagle3", CHAINS), ("eagle3", TREES), ("medusa", TREES), ("draft_model", CHAINS)),
    ("draft_model", DRAWN),
]
NAMES = [f"{method}-{'trees' if config is TREES else config.acceptance}" for method, config in METHODS]
