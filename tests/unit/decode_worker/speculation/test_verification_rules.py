"""The verification rules on particular numbers."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import pytest
import torch

from baton.core.drafts import NO_DRAFT, ROOT, Draft, ScheduledSequence
from baton.core.errors import ConfigError
from baton.core.request import Request, SamplingParams
from baton.engine.contracts import VerifyResult
from baton.engine.sampling.verification import sampling_row
from decode_worker.speculation import acceptance_rules
from decode_worker.speculation.acceptance_rules import (
    ResidualRule,
    TypicalRule,
    Verdict,
    coin_stream,
    draft_stream,
    draw_drafts,
)
from decode_worker.speculation.verification import RuleVerifier, SampleAndMatch, create_verifier, sampling_rows
from tests.toy_language import Table, ToyDrafter, batch_of, logits_of

_TABLE = Table(6, seed=3)
_DRAFT_TABLE = Table(6, seed=4)


def sequence_of(
    draft: Draft, temperature: float = 1.0, name: str = "x", seed: int = 0, logprobs: int | None = None
) -> ScheduledSequence:
    params = SamplingParams(max_tokens=20, temperature=temperature, seed=seed, logprobs=logprobs)
    request = Request(name, [1, 2], params, output_token_ids=[3])
    request.num_computed_tokens = 2
    return ScheduledSequence(request, 1, draft)


def judged(rule: ResidualRule | TypicalRule, draft: Draft, target: Sequence[Sequence[float]]) -> Verdict:
    return rule.judge(draft, torch.tensor(target, dtype=torch.float64), sampling_rows(sequence_of(draft)))


def with_numbers(monkeypatch: pytest.MonkeyPatch, numbers: dict[int, float]) -> None:
    """Uniform numbers by stream; others are 0.5."""

    def uniform(seed: int, position: int, stream: int = 0) -> float:
        return numbers.get(stream, 0.5)

    monkeypatch.setattr(acceptance_rules, "uniform", uniform)


@pytest.mark.parametrize(("coin", "accepted"), [(0.0, True), (0.49, True), (0.5, False), (0.99, False)])
def test_a_drawn_token_is_accepted_below_the_ratio(
    monkeypatch: pytest.MonkeyPatch, coin: float, accepted: bool
) -> None:
    with_numbers(monkeypatch, {coin_stream(0): coin})
    draft = Draft((0,), probs=torch.tensor([[0.8, 0.1, 0.1]]))
    verdict = judged(ResidualRule(), draft, [[0.4, 0.5, 0.1], [0.0, 0.0, 1.0]])
    # The residual of the first row is all on token 1.
    assert verdict == (Verdict((0,), 2) if accepted else Verdict((), 1))


def test_a_coin_of_zero_does_not_accept_a_token_of_probability_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    with_numbers(monkeypatch, {coin_stream(0): 0.0})
    draft = Draft((0,), probs=torch.tensor([[0.5, 0.5, 0.0]]))
    assert judged(ResidualRule(), draft, [[0.0, 0.5, 0.5], [1, 0, 0]]) == Verdict((), 2)


@pytest.mark.parametrize("q", [[0.25, 0.25, 0.5], [0.0, 0.0, 0.0], [math.nan] * 3])
def test_a_residual_without_mass_falls_back_to_the_target(monkeypatch: pytest.MonkeyPatch, q: list[float]) -> None:
    """Rounding or a broken draft may cause such a residual."""
    with_numbers(monkeypatch, {coin_stream(0): 1.0, acceptance_rules.RECOVER: 0.3})
    draft = Draft((0,), probs=torch.tensor([q]))
    assert judged(ResidualRule(), draft, [[0.25, 0.25, 0.5], [1, 0, 0]]) == Verdict((), 1)


def test_the_second_sibling_is_judged_by_the_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    draft = Draft((0, 1), (ROOT, ROOT), probs=torch.tensor([[0.5, 0.3, 0.2]] * 2))
    target = [[0.1, 0.4, 0.5], [1, 0, 0], [0, 0, 1]]
    # Left of p is (0, 1/4, 3/4), of q (0, 3/5, 2/5): the ratio is 5/12.
    with_numbers(monkeypatch, {coin_stream(0): 0.21, coin_stream(1): 0.41})
    assert judged(ResidualRule(), draft, target) == Verdict((1,), 2)
    with_numbers(monkeypatch, {coin_stream(0): 0.21, coin_stream(1): 0.42})
    assert judged(ResidualRule(), draft, target) == Verdict((), 2)


def test_a_draft_that_was_not_drawn_is_refused() -> None:
    with pytest.raises(ValueError, match="needs the probabilities"):
        judged(ResidualRule(), Draft((0,)), [[1, 0], [1, 0]])


@pytest.mark.parametrize("rule", [ResidualRule(), TypicalRule()])
def test_nan_rows_end_the_path(rule: ResidualRule | TypicalRule) -> None:
    draft = Draft((3, 4), probs=torch.full((2, 6), 1 / 6))
    logits = torch.zeros(3, 6)
    logits[0, 3] = 50.0
    logits[1] = math.nan
    [result] = RuleVerifier(rule).verify(batch_of([sequence_of(draft, logprobs=0)]), logits)
    assert (result.accepted, result.next_token, result.nodes) == ((3,), None, (0,))
    assert result.logprobs is not None
    assert len(result.logprobs) == 1
    logits[0] = math.nan
    [result] = RuleVerifier(rule).verify(batch_of([sequence_of(draft, logprobs=0)]), logits)
    assert (result.accepted, result.next_token, result.logprobs) == ((), None, None)


def test_typical_acceptance_accepts_plausible_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    with_numbers(monkeypatch, {acceptance_rules.PLAIN: 0.0})
    peaked, flat = [0.9, 0.06, 0.04], [0.34, 0.33, 0.33]
    rule = TypicalRule(epsilon=0.2, alpha=0.3)
    threshold = 0.3 * math.exp(sum(p * math.log(p) for p in peaked))
    assert 0.06 < 0.2 < threshold
    assert judged(rule, Draft((1,)), [peaked, flat]) == Verdict((), 0)
    assert judged(TypicalRule(epsilon=0.05, alpha=0.3), Draft((1,)), [peaked, flat]) == Verdict((0,), 0)
    assert judged(rule, Draft((2,)), [flat, [0.0, 1.0, 0.0]]) == Verdict((0,), 1)
    # Where the target is undecided, alpha lowers the threshold below epsilon.
    assert judged(TypicalRule(epsilon=0.4, alpha=0.3), Draft((2,)), [flat, peaked]) == Verdict((0,), 0)
    assert judged(TypicalRule(epsilon=0.4, alpha=1.1), Draft((2,)), [flat, peaked]) == Verdict((), 0)


def test_typical_acceptance_prefers_the_deepest_and_then_the_first_branch() -> None:
    sure = [0.5, 0.5, 0.0]
    #   root ─ 0 (token 0) ─ 3 (token 2, impossible)
    #        └ 1 (token 1) ─ 2 (token 1) and 4 (token 0)
    draft = Draft((0, 1, 1, 2, 0), (ROOT, ROOT, 1, 0, 1))
    last = [0.0, 0.0, 1.0]
    assert judged(TypicalRule(), draft, [sure, sure, sure, last, sure, sure]) == Verdict((1, 2), 2)
    assert judged(TypicalRule(), Draft((0, 1), (ROOT, ROOT)), [sure, last, sure]) == Verdict((0,), 2)
    impossible = Draft((2, 0), (ROOT, 0))
    assert judged(TypicalRule(), impossible, [sure, sure, sure]).nodes == ()


def test_rules_declare_whether_they_are_lossless(caplog: pytest.LogCaptureFixture) -> None:
    assert ResidualRule.is_lossless
    assert not TypicalRule.is_lossless
    with caplog.at_level(logging.WARNING):
        create_verifier("residual")
        assert not caplog.records
        create_verifier("typical")
        assert "not distributed as the model's own" in caplog.text


def test_verifiers_are_created_by_name() -> None:
    assert isinstance(create_verifier(), SampleAndMatch)
    typical = create_verifier("typical", epsilon=0.3, alpha=0.5)
    assert isinstance(typical, RuleVerifier)
    assert typical.rule == TypicalRule(0.3, 0.5)
    with pytest.raises(ConfigError, match=r"expected one of: match, residual, typical\. Did you mean 'residual'\?"):
        create_verifier("residul")
    with pytest.raises(ConfigError, match="epsilon"):
        create_verifier("typical", epsilon=0.0)
    with pytest.raises(ConfigError, match="alpha"):
        create_verifier("typical", alpha=math.nan)


@pytest.mark.parametrize("acceptance", ["residual", "typical"])
def test_each_sequence_of_a_batch_gets_the_same_result_as_alone(acceptance: str) -> None:
    drafters = {
        "chain": ToyDrafter(_DRAFT_TABLE, (1, 1, 1)),
        "tree": ToyDrafter(_DRAFT_TABLE, (2, 2), bushy=True),
        "guess": ToyDrafter(_DRAFT_TABLE, (2, 1), drawn=False),
    }
    sequences: list[ScheduledSequence] = []
    for seed in range(8):
        for name, drafter in drafters.items():
            empty = sequence_of(NO_DRAFT, 0.0 if seed == 3 else 0.9, f"{name} {seed}", seed, logprobs=1)
            sequences.append(ScheduledSequence(empty.request, 1, drafter(empty.request)))
        sequences.append(sequence_of(NO_DRAFT, 0.9, f"none {seed}", seed))
    verifier = create_verifier(acceptance)
    alone = [verifier.verify(batch_of([sequence]), logits_of(_TABLE, sequence))[0] for sequence in sequences]
    together = verifier.verify(batch_of(sequences), torch.cat([logits_of(_TABLE, sequence) for sequence in sequences]))
    assert [outline(result) for result in together] == [outline(result) for result in alone]
    assert any(result.accepted for result in alone)
    # Greedy requests, and those without anything to judge by, get the tokens of plain decoding.
    matched = SampleAndMatch().verify(
        batch_of(sequences), torch.cat([logits_of(_TABLE, sequence) for sequence in sequences])
    )
    for mine, plain in zip(together, matched, strict=True):
        request = mine.sequence.request
        if (
            request.params.is_greedy
            or not mine.num_drafted
            or (acceptance, request.request_id[:5])
            == (
                "residual",
                "guess",
            )
        ):
            assert outline(mine) == outline(plain)


def outline(result: VerifyResult) -> tuple[object, ...]:
    logprobs = None if result.logprobs is None else [round(entry.logprob, 5) for entry in result.logprobs]
    return result.sequence.request.request_id, result.accepted, result.next_token, result.nodes, logprobs


def test_sequences_without_logits_have_no_result() -> None:
    batch = batch_of([sequence_of(NO_DRAFT)])
    batch.rows_of = [range(0)]
    for verifier in (SampleAndMatch(), RuleVerifier(ResidualRule())):
        assert verifier.verify(batch, torch.empty(0, 6)) == []


def test_siblings_are_drawn_without_replacement() -> None:
    probs = torch.tensor([[0.0, 0.5, 0.0, 0.5], [0.25, 0.25, 0.25, 0.25], [0.0, 0.0, 1.0, 0.0]])
    rows = [sampling_row(sequence_of(NO_DRAFT, seed=seed).request) for seed in range(3)]
    drawn = draw_drafts(probs, rows, num_siblings=3)
    assert sorted(drawn[0]) == [1, 3]
    assert len(set(drawn[1])) == 3
    assert drawn[2] == [2]
    assert draw_drafts(probs, rows, num_siblings=3) == drawn
    assert [tokens[:1] for tokens in drawn] == draw_drafts(probs, rows)
    assert draft_stream(0) != draft_stream(1)
