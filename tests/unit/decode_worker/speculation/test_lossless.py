"""The law of speculation is that of plain decoding: exactly, by integration over all random numbers.

A request of a few tokens over a tiny vocabulary runs through draft, verification and draft again until it is finished,
in every way in which its random numbers can fall. Rules that are broken on purpose must not pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch

from baton.core.drafts import NO_DRAFT, Draft, ScheduledSequence
from baton.core.request import Request, SamplingParams, TokenLogprobs
from baton.engine.contracts import Verifier
from baton.engine.sampling import sampler
from baton.engine.sampling.logits import SamplingRow
from baton.engine.sampling.verification import PlainSampling
from decode_worker.speculation import acceptance_rules, verification
from decode_worker.speculation.acceptance_rules import (
    PLAIN,
    RECOVER,
    AcceptanceRule,
    ResidualRule,
    coin_stream,
    draft_stream,
    draw_token,
)
from decode_worker.speculation.verification import RuleVerifier, SampleAndMatch, create_verifier, sampling_rows
from tests.exact_law import law_of
from tests.toy_language import PROMPT, Drafter, Table, ToyDrafter, generate, no_drafter

_ROUNDING = 1e-6

PARAMS = {
    "temperature": SamplingParams(max_tokens=3, temperature=0.8),
    "top_k": SamplingParams(max_tokens=3, temperature=1.3, top_k=2),
    "top_p and min_p": SamplingParams(max_tokens=3, temperature=1.1, top_p=0.85, min_p=0.08),
    "penalties": SamplingParams(max_tokens=3, repetition_penalty=1.7, presence_penalty=0.9, frequency_penalty=0.6),
    "bias and min_tokens": SamplingParams(
        max_tokens=3, logit_bias=((2, 1.5), (0, -0.5)), stop_token_ids=(1,), min_tokens=1
    ),
    "everything": SamplingParams(
        max_tokens=3,
        temperature=0.9,
        top_k=2,
        top_p=0.95,
        min_p=0.02,
        repetition_penalty=1.3,
        frequency_penalty=0.5,
        logit_bias=((2, 0.7),),
        stop_token_ids=(0,),
        min_tokens=2,
    ),
}
# At most prefixes two tokens or more are likelier to the target than to the draft, so that residuals matter.
_TARGET, _DRAFT = Table(3, seed=7), Table(3, seed=15)
_WIDE_TARGET, _WIDE_DRAFT = Table(5, seed=5), Table(5, seed=13)


@dataclass(frozen=True, slots=True)
class ToyCase:
    """Three tokens of a language of three, or two of a language of five."""

    drafter: Drafter
    target: Table = _TARGET
    max_tokens: int = 3

    def run(self, verifier: Verifier, params: SamplingParams) -> tuple[tuple[int, ...], tuple[TokenLogprobs, ...]]:
        return generate(self.target, verifier, self.drafter, replace(params, max_tokens=self.max_tokens))


GUESSING = {
    "likeliest chain": ToyCase(ToyDrafter(_DRAFT, (1, 1), drawn=False)),
    "likeliest tree": ToyCase(ToyDrafter(_DRAFT, (2, 1), drawn=False)),
    "bushy tree of what may not come": ToyCase(ToyDrafter(_DRAFT, (2, 2), drawn=False, processed=False, bushy=True)),
    "likeliest siblings": ToyCase(ToyDrafter(_WIDE_DRAFT, (3,), drawn=False), _WIDE_TARGET, 2),
}
DRAWING = {
    "chain": ToyCase(ToyDrafter(_DRAFT, (1, 1))),
    "chain without the filters": ToyCase(ToyDrafter(_DRAFT, (1, 1), processed=False)),
    "perfect chain": ToyCase(ToyDrafter(_TARGET, (1, 1))),
    "tree": ToyCase(ToyDrafter(_DRAFT, (2, 1))),
    "bushy tree": ToyCase(ToyDrafter(_DRAFT, (2, 1), bushy=True)),
    "perfect tree": ToyCase(ToyDrafter(_TARGET, (2, 1))),
    "siblings": ToyCase(ToyDrafter(_WIDE_DRAFT, (2,)), _WIDE_TARGET, 2),
    "many siblings": ToyCase(ToyDrafter(_WIDE_DRAFT, (4,)), _WIDE_TARGET, 2),
    "siblings without the filters": ToyCase(ToyDrafter(_WIDE_DRAFT, (3,), processed=False), _WIDE_TARGET, 2),
}

# Each parameter with a draft of every shape, and each draft with all parameters at once and with the plainest.
_FOR_ALL = ("temperature", "everything")
_IN_ALL_WAYS = ("chain", "tree", "siblings")

Law = Mapping[tuple[int, ...], float]


def output_law(verifier: Verifier, setup: ToyCase, params: str) -> Law:
    return law_of(lambda: setup.run(verifier, PARAMS[params])[0])


@cache
def plain_law(setup: ToyCase, params: str) -> Law:
    return output_law(PlainSampling(), replace(setup, drafter=no_drafter), params)


def problems(verifier: Verifier, setup: ToyCase, params: str) -> list[str]:
    """Differences from the law of plain decoding. Impossible tokens must not appear, even with probability 0."""
    law, plain = output_law(verifier, setup, params), plain_law(setup, params)
    found = [f"{tokens} can come" for tokens in law if not plain.get(tokens)]
    for tokens, probability in plain.items():
        if abs(law.get(tokens, 0.0) - probability) > _ROUNDING:
            found.append(f"{tokens} has {law.get(tokens, 0.0):.6f} instead of {probability:.6f}")
    return found


@pytest.mark.parametrize("setup", GUESSING)
@pytest.mark.parametrize("params", PARAMS)
def test_guesses_leave_the_distribution_unchanged(params: str, setup: str) -> None:
    assert problems(SampleAndMatch(), GUESSING[setup], params) == []


@pytest.mark.parametrize(
    ("params", "setup"),
    [
        pytest.param(
            params,
            setup,
            marks=()
            if params in _FOR_ALL or setup in _IN_ALL_WAYS
            else pytest.mark.thorough(covered_by="[everything-"),
        )
        for params in PARAMS
        for setup in DRAWING
    ],
)
def test_drawn_drafts_leave_the_distribution_unchanged(params: str, setup: str) -> None:
    assert problems(create_verifier("residual"), DRAWING[setup], params) == []


@pytest.mark.parametrize(
    ("acceptance", "setup"),
    [
        ("match", DRAWING["chain"]),
        ("match", DRAWING["tree"]),
        ("match", DRAWING["siblings without the filters"]),
        ("residual", GUESSING["likeliest chain"]),
        ("residual", GUESSING["likeliest tree"]),
    ],
)
def test_either_rule_accepts_either_kind_of_draft(acceptance: str, setup: ToyCase) -> None:
    assert problems(create_verifier(acceptance), setup, "everything") == []


@pytest.mark.parametrize("acceptance", ["match", "residual"])
@pytest.mark.parametrize("setup", [GUESSING["likeliest tree"], DRAWING["chain"], DRAWING["tree"]])
def test_log_probabilities_are_those_of_the_model(acceptance: str, setup: ToyCase) -> None:
    params = replace(PARAMS["everything"], logprobs=2)
    law = law_of(lambda: setup.run(create_verifier(acceptance), params))
    assert len(law) > 3
    for tokens, logprobs in law:
        assert len(logprobs) == len(tokens)
        for place, (token, entry) in enumerate(zip(tokens, logprobs, strict=True)):
            expected = torch.log_softmax(_TARGET.logits([*PROMPT, *tokens[:place]]), dim=-1)
            assert entry.logprob == pytest.approx(float(expected[token]), abs=1e-6)
            assert [chosen for chosen, _ in entry.top] == expected.topk(2).indices.tolist()


class AcceptsWithProbabilityZero(ResidualRule):
    def accepts(self, p: float, q: float, row: SamplingRow, tried: int) -> bool:
        return uniform_of_test(row, coin_stream(tried)) <= p / q


class SharesNoiseOfCoinAndRecovery(ResidualRule):
    def recover(self, left: torch.Tensor, row: SamplingRow) -> int | None:
        return draw_token(left, row, coin_stream(0))


class SharesTheCoinAmongSiblings(ResidualRule):
    def accepts(self, p: float, q: float, row: SamplingRow, tried: int) -> bool:
        return super().accepts(p, q, row, 0)


class RecoversFromTheTarget(ResidualRule):
    def reject(self, p: torch.Tensor, q: torch.Tensor, token: int) -> tuple[torch.Tensor, torch.Tensor]:
        return p, super().reject(p, q, token)[1]


class ForgetsToNormaliseTheResidual(ResidualRule):
    """Draws as if the cumulated residual ended at 1, so that the missing mass goes to the last token."""

    def reject(self, p: torch.Tensor, q: torch.Tensor, token: int) -> tuple[torch.Tensor, torch.Tensor]:
        return (p - q).clamp_min(0), super().reject(p, q, token)[1]

    def recover(self, left: torch.Tensor, row: SamplingRow) -> int | None:
        left = left.clone()
        left[int(left.nonzero()[-1])] += 1 - left.sum()
        return super().recover(left, row)


class ForgetsToNormaliseForTheNextSibling(ResidualRule):
    def reject(self, p: torch.Tensor, q: torch.Tensor, token: int) -> tuple[torch.Tensor, torch.Tensor]:
        return (p - q).clamp_min(0), super().reject(p, q, token)[1]


class KeepsTriedTokens(ResidualRule):
    """Treats siblings as if they were drawn independently of each other."""

    def reject(self, p: torch.Tensor, q: torch.Tensor, token: int) -> tuple[torch.Tensor, torch.Tensor]:
        return super().reject(p, q, token)[0], q


class RemovesWithoutSubtracting(ResidualRule):
    """The rule for guesses, on drafts that were drawn."""

    def reject(self, p: torch.Tensor, q: torch.Tensor, token: int) -> tuple[torch.Tensor, torch.Tensor]:
        p = p.clone()
        p[token] = 0
        return p / p.sum(), super().reject(p, q, token)[1]


def uniform_of_test(row: SamplingRow, stream: int) -> float:
    return acceptance_rules.uniform(row.params.seed, row.position, stream)


@pytest.mark.parametrize(
    ("rule", "setup", "params"),
    [
        (AcceptsWithProbabilityZero, "chain without the filters", "top_k"),
        (AcceptsWithProbabilityZero, "siblings without the filters", "everything"),
        (SharesNoiseOfCoinAndRecovery, "chain", "temperature"),
        (SharesNoiseOfCoinAndRecovery, "siblings", "penalties"),
        (SharesTheCoinAmongSiblings, "siblings", "temperature"),
        (RecoversFromTheTarget, "chain", "temperature"),
        (RecoversFromTheTarget, "tree", "top_p and min_p"),
        (ForgetsToNormaliseTheResidual, "chain", "temperature"),
        (ForgetsToNormaliseForTheNextSibling, "siblings", "temperature"),
        (KeepsTriedTokens, "siblings", "temperature"),
        (RemovesWithoutSubtracting, "chain", "penalties"),
    ],
)
def test_broken_rules_do_not_pass(rule: type[AcceptanceRule], setup: str, params: str) -> None:
    assert problems(RuleVerifier(rule()), DRAWING[setup], params)


@pytest.mark.parametrize("shared_with", [lambda sibling: RECOVER, coin_stream])
def test_a_draft_that_shares_noise_with_its_verification_does_not_pass(
    monkeypatch: pytest.MonkeyPatch, shared_with: Callable[[int], int]
) -> None:
    monkeypatch.setattr(acceptance_rules, "draft_stream", shared_with)
    assert problems(create_verifier("residual"), DRAWING["chain"], "temperature")


def test_a_drawn_draft_that_omits_unlikely_tokens_does_not_pass() -> None:
    """The condition that ``ResidualRule`` names."""

    def leaves_out(request: Request) -> Draft:
        draft = DRAWING["chain"].drafter(request)
        if draft.probs is None or float(draft.probs[0, draft.token_ids[0]]) > 0.4:
            return draft
        return NO_DRAFT

    assert problems(create_verifier("residual"), ToyCase(leaves_out), "temperature")


@pytest.mark.parametrize("mistake", ["penalties of the root for all", "one position for all", "bonus unprocessed"])
@pytest.mark.parametrize("acceptance", ["match", "residual"])
def test_rows_with_missing_information_do_not_pass(
    monkeypatch: pytest.MonkeyPatch, acceptance: str, mistake: str
) -> None:
    def rows_of(sequence: ScheduledSequence) -> list[SamplingRow]:
        rows = sampling_rows(sequence)
        if mistake == "penalties of the root for all":
            return [replace(row, output_token_ids=rows[0].output_token_ids) for row in rows]
        if mistake == "one position for all":
            return [replace(row, position=rows[0].position) for row in rows]
        return [*rows[:-1], replace(rows[-1], params=SamplingParams(max_tokens=3))] if len(rows) > 1 else rows

    monkeypatch.setattr(verification, "sampling_rows", rows_of)
    setup = GUESSING["likeliest chain"] if acceptance == "match" else DRAWING["chain"]
    assert problems(create_verifier(acceptance), setup, "penalties")


@pytest.mark.parametrize("number", [0.0, 1 - 2.0**-53])
@pytest.mark.parametrize("setup", DRAWING)
@pytest.mark.parametrize("params", PARAMS)
def test_extreme_noise_yields_nothing_impossible(
    monkeypatch: pytest.MonkeyPatch, params: str, setup: str, number: float
) -> None:
    """With the real draws: coins of 0, and numbers as near to 1 as there are."""
    possible = plain_law(DRAWING[setup], params)
    for module in (sampler, acceptance_rules):
        monkeypatch.setattr(module, "uniform", lambda seed, position, stream=0: number)
    for acceptance in ("match", "residual"):
        tokens, _ = DRAWING[setup].run(create_verifier(acceptance), PARAMS[params])
        assert tokens in possible


def test_the_search_draws_like_the_sampler() -> None:
    weights = torch.tensor([0.0, 0.2, 0.0, 0.5, 0.3, 0.0], dtype=torch.float64)
    law = law_of(lambda: int(sampler.draw(weights[None], [sampler.uniform(0, 0)])))
    assert law == pytest.approx({1: 0.2, 3: 0.5, 4: 0.3})
    grid = [(place + 0.5) / 1000 for place in range(1000)]
    drawn = sampler.draw(weights.expand(1000, -1), grid).tolist()
    assert [drawn.count(token) for token in range(6)] == [0, 200, 0, 500, 300, 0]
    assert sampler.draw(weights[None], [0.0]).tolist() == [1]
    assert sampler.draw(weights[None], [1 - 2.0**-53]).tolist() == [4]


def test_the_search_integrates_comparisons() -> None:
    def program() -> tuple[bool, bool, bool]:
        first, second = sampler.uniform(0, 0), sampler.uniform(0, 1)
        return first < 0.25, first < 0.5, second < 0.1

    assert law_of(program) == pytest.approx(
        {
            (True, True, True): 0.025,
            (True, True, False): 0.225,
            (False, True, True): 0.025,
            (False, True, False): 0.225,
            (False, False, True): 0.05,
            (False, False, False): 0.45,
        }
    )
    assert law_of(lambda: sampler.uniform(0, 0) < 0) == {False: 1.0}
    assert law_of(lambda: sampler.uniform(0, 0) <= 0) == {False: 1.0, True: 0.0}


def test_all_noise_streams_differ() -> None:
    streams = [PLAIN, RECOVER, *map(coin_stream, range(50)), *map(draft_stream, range(50))]
    assert len(set(streams)) == len(streams)
    assert min(streams) == 0
