"""Drawn drafts through the real engine: the joint distribution of two tokens, reproducibility, what is left behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from baton.core.chunk_budget import SchedulerLimits
from baton.core.request import Request, SamplingParams
from baton.engine.contracts import Proposer, Verifier
from baton.engine.engine import Engine
from baton.engine.kv_cache.block_manager import BlockManager
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.sampling.logits import process_logits
from baton.engine.sampling.verification import sampling_row
from baton.engine.scheduling.scheduler import Scheduler
from benchmarks.losslessness import ChiSquare, chi_square
from decode_worker.speculation.acceptance_rules import AcceptanceRule, ResidualRule
from decode_worker.speculation.verification import RuleVerifier, create_verifier
from tests.drawing_proposer import DrawingProposer, NextTokenLogits
from tests.engine_runs import build_engine, greedy, run, tokens_of
from tests.tiny_models import random_prompts, tiny_model

_NUM_DRAWS = 750
_PARAMS = SamplingParams(max_tokens=3, temperature=1.2, top_k=4, top_p=0.97, presence_penalty=0.5)
_PROMPT = random_prompts((6,))[0]
_PROMPTS = random_prompts((1, 4, 7, 12, 20, 33))
_EACH = [
    SamplingParams(max_tokens=16, temperature=1.0, seed=11, top_k=20),
    greedy(16),
    SamplingParams(max_tokens=16, temperature=0.8, seed=12, frequency_penalty=0.4, logprobs=2),
    SamplingParams(max_tokens=9, temperature=1.1, seed=13, top_p=0.9, stop_token_ids=tuple(range(60)), min_tokens=4),
    SamplingParams(max_tokens=16, temperature=0.5, seed=14, repetition_penalty=1.2),
    SamplingParams(max_tokens=1, temperature=1.0, seed=15),
]


@pytest.fixture(scope="module")
def logits() -> NextTokenLogits:
    return NextTokenLogits(tiny_model())


def engine_with(
    runner: ModelRunner, verifier: Verifier, proposer: Proposer, *, num_blocks: int | None = None
) -> Engine:
    for tensor in (*runner.cache.keys, *runner.cache.values):
        tensor.fill_(torch.nan)
    limits = SchedulerLimits(512, 64, runner.loaded.max_model_len)
    blocks = BlockManager(num_blocks or runner.cache.num_blocks, runner.spec.block_size)
    return Engine(runner, Scheduler(limits, blocks), verifier, proposer)


def joint_law(logits: NextTokenLogits) -> dict[tuple[int, int], float]:
    """Of the first two tokens behind the prompt."""

    def law_behind(output: Sequence[int]) -> dict[int, float]:
        row = sampling_row(Request("x", _PROMPT, _PARAMS), output)
        probs = torch.softmax(process_logits(logits([*_PROMPT, *output])[None], [row])[0].double(), dim=-1)
        return {token: float(probs[token]) for token in probs.nonzero().flatten().tolist()}

    return {
        (first, second): probability * then
        for first, probability in law_behind([]).items()
        for second, then in law_behind([first]).items()
    }


def joints(runner: ModelRunner, logits: NextTokenLogits, verifier: Verifier, shape: tuple[int, ...]) -> ChiSquare:
    """Of the first two tokens of many requests against their law."""
    proposer = DrawingProposer(logits, shape)
    params = [replace(_PARAMS, seed=seed) for seed in range(_NUM_DRAWS)]
    outcomes = run(engine_with(runner, verifier, proposer), [_PROMPT] * _NUM_DRAWS, params)
    drafted = sum(result.num_drafted for result in proposer.results)
    accepted = sum(len(result.accepted) for result in proposer.results)
    assert 0.05 * drafted < accepted < 0.8 * drafted
    return chi_square(Counter(tuple(outcome.token_ids[:2]) for outcome in outcomes), joint_law(logits))


@pytest.mark.parametrize(
    ("acceptance", "shape"),
    [
        ("match", (1, 1)),
        pytest.param("residual", (1, 1), marks=pytest.mark.thorough(covered_by="[residual-shape2]")),
        ("residual", (2,)),
    ],
)
def test_two_tokens_have_the_joint_distribution_of_the_target(
    runner: ModelRunner, logits: NextTokenLogits, acceptance: str, shape: tuple[int, ...]
) -> None:
    assert joints(runner, logits, create_verifier(acceptance), shape).p_value > 1e-3


class RecoversFromTheTarget(ResidualRule):
    def reject(self, p: torch.Tensor, q: torch.Tensor, token: int) -> tuple[torch.Tensor, torch.Tensor]:
        return p, super().reject(p, q, token)[1]


class RemovesWithoutSubtracting(ResidualRule):
    def reject(self, p: torch.Tensor, q: torch.Tensor, token: int) -> tuple[torch.Tensor, torch.Tensor]:
        p = p.clone()
        p[token] = 0
        return p / p.sum(), super().reject(p, q, token)[1]


@pytest.mark.parametrize(
    "rule",
    [
        RecoversFromTheTarget,
        pytest.param(RemovesWithoutSubtracting, marks=pytest.mark.thorough(covered_by="[RecoversFromTheTarget]")),
    ],
)
def test_broken_rules_change_the_joint_distribution(
    runner: ModelRunner, logits: NextTokenLogits, rule: type[AcceptanceRule]
) -> None:
    assert joints(runner, logits, RuleVerifier(rule()), (1, 1)).p_value < 1e-6


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1)])
def test_seeded_requests_get_the_same_tokens_in_any_batch(
    runner: ModelRunner, logits: NextTokenLogits, shape: tuple[int, ...]
) -> None:
    together = tokens_of(
        run(engine_with(runner, create_verifier("residual"), DrawingProposer(logits, shape)), _PROMPTS, _EACH)
    )
    proposer = DrawingProposer(logits, shape)
    alone = [
        run(engine_with(runner, create_verifier("residual"), proposer), [prompt], params)[0].token_ids
        for prompt, params in zip(_PROMPTS, _EACH, strict=True)
    ]
    assert together == alone
    assert any(result.accepted for result in proposer.results)


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1)])
def test_drawn_drafts_match_plain_decoding_by_default(
    runner: ModelRunner, logits: NextTokenLogits, shape: tuple[int, ...]
) -> None:
    plain = tokens_of(run(build_engine(runner), _PROMPTS, _EACH))
    proposer = DrawingProposer(logits, shape)
    assert tokens_of(run(engine_with(runner, create_verifier(), proposer), _PROMPTS, _EACH)) == plain
    assert any(result.accepted for result in proposer.results)


@pytest.mark.parametrize("acceptance", ["residual", "typical"])
def test_greedy_requests_match_plain_decoding_under_every_rule(
    runner: ModelRunner, logits: NextTokenLogits, acceptance: str
) -> None:
    plain = tokens_of(run(build_engine(runner), _PROMPTS, greedy(12)))
    engine = engine_with(runner, create_verifier(acceptance), DrawingProposer(logits, (2, 1), blur=0.2))
    assert tokens_of(run(engine, _PROMPTS, greedy(12))) == plain


@pytest.mark.parametrize("acceptance", ["residual", "typical"])
def test_accepted_tokens_leave_the_cache_consistent(
    runner: ModelRunner, logits: NextTokenLogits, acceptance: str
) -> None:
    """Under preemption, with trees: greedy conversations go on from the sampled tokens as from any others."""
    engine = engine_with(runner, create_verifier(acceptance), DrawingProposer(logits, (2, 2)), num_blocks=18)
    outcomes = run(engine, _PROMPTS, _EACH)
    assert engine.scheduler.num_preemptions > 0
    assert engine.scheduler.blocks.check([]) == []
    assert engine.scheduler.blocks.usage().used == 0
    for outcome, params in zip(outcomes, _EACH, strict=True):
        assert len(outcome.token_ids) <= params.max_tokens
        counts = [(len(output.token_ids), len(output.logprobs or ())) for output in outcome.outputs]
        assert all(num_logprobs == (num if params.logprobs is not None else 0) for num, num_logprobs in counts)
    assert len(outcomes[3].token_ids) >= _EACH[3].min_tokens
    longer = [prompt + outcome.token_ids for prompt, outcome in zip(_PROMPTS, outcomes, strict=True)]
    again = tokens_of([run(engine, [prompt], greedy(6))[0] for prompt in longer])
    assert again == tokens_of(
        [run(build_engine(runner, prefix_caching=False), [prompt], greedy(6))[0] for prompt in longer]
    )
