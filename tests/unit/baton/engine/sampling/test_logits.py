"""Logits processing against transformers' own warpers and processors, and by formula where it has none."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import baton.engine.sampling.logits as logits_module
from baton.core.request import SamplingParams
from baton.engine.sampling.logits import SamplingRow, process_logits

VOCAB_SIZE = 50
NEG_INF = float("-inf")

seeds = st.integers(0, 2**32 - 1)
tokens = st.integers(0, VOCAB_SIZE - 1)
token_lists = st.lists(tokens, max_size=12)


def random_logits(seed: int, num_rows: int = 1) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 4


def row(params: SamplingParams, prompt: list[int] | None = None, output: list[int] | None = None) -> SamplingRow:
    prompt, output = prompt or [], output or []
    return SamplingRow(params, len(prompt) + len(output), prompt, output, params.token_edits())


sampled_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.1, 0.7, 1.0, 1.9]),
    top_k=st.sampled_from([-1, 0, 1, 3, 20, VOCAB_SIZE, VOCAB_SIZE + 1]),
    top_p=st.sampled_from([0.0, 0.05, 0.3, 0.61, 0.9, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.2, 0.8, 1.0]),
    repetition_penalty=st.sampled_from([0.5, 1.0, 1.3]),
)
any_params = st.builds(
    SamplingParams,
    max_tokens=st.just(16),
    temperature=st.sampled_from([0.0, 0.0, 0.5, 1.0]),
    top_k=st.sampled_from([0, 1, 5]),
    top_p=st.sampled_from([0.4, 1.0]),
    min_p=st.sampled_from([0.0, 0.3]),
    repetition_penalty=st.sampled_from([1.0, 1.4]),
    presence_penalty=st.sampled_from([0.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, -0.7]),
    logit_bias=st.lists(st.tuples(tokens, st.floats(-100, 100, width=32)), max_size=3).map(tuple),
    stop_token_ids=st.lists(tokens, max_size=3).map(tuple),
    min_tokens=st.integers(0, 16),
)


def by_transformers(logits: torch.Tensor, params: SamplingParams, history: list[int]) -> torch.Tensor:
    steps = LogitsProcessorList()
    if params.repetition_penalty != 1 and history:
        steps.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    steps.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k > 0:
        steps.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        steps.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        steps.append(MinPLogitsWarper(params.min_p))
    return steps(torch.tensor([history], dtype=torch.int64), logits)


@settings(deadline=None, max_examples=300)
@given(seed=seeds, params=sampled_params, prompt=token_lists, output=token_lists)
def test_processors_match_transformers(seed: int, params: SamplingParams, prompt: list[int], output: list[int]) -> None:
    logits = random_logits(seed)
    processed = process_logits(logits, [row(params, prompt, output)])
    expected = by_transformers(logits, params, prompt + output)
    torch.testing.assert_close(processed, expected, rtol=1e-5, atol=1e-5)
    assert bool(torch.isfinite(processed).any())


@settings(deadline=None)
@given(seed=seeds, output=token_lists, presence=st.floats(-2, 2), frequency=st.floats(-2, 2))
def test_presence_and_frequency_count_output_tokens_only(
    seed: int, output: list[int], presence: float, frequency: float
) -> None:
    params = SamplingParams(temperature=0, presence_penalty=presence, frequency_penalty=frequency)
    logits = random_logits(seed)
    processed = process_logits(logits, [row(params, prompt=[1, 2, 3], output=output)])
    for token in range(VOCAB_SIZE):
        count = output.count(token)
        expected = logits[0, token] - presence * (count > 0) - frequency * count
        torch.testing.assert_close(processed[0, token], expected, rtol=1e-5, atol=1e-5)


def test_logit_bias_is_added() -> None:
    logits = random_logits(0)
    params = SamplingParams(temperature=0, logit_bias=((3, 5.0), (7, -100.0)))
    expected = logits.clone()
    expected[0, 3] += 5
    expected[0, 7] -= 100
    assert torch.equal(process_logits(logits, [row(params)]), expected)


def test_min_tokens_forbids_ending_too_early() -> None:
    logits = random_logits(0)
    params = SamplingParams(temperature=0, max_tokens=8, min_tokens=3, stop_token_ids=(4, 9))
    for num_output in range(5):
        processed = process_logits(logits, [row(params, output=[1] * num_output)])
        held_back = (processed == NEG_INF).nonzero()[:, 1].tolist()
        assert held_back == ([4, 9] if num_output < 3 else [])


def test_forbidden_tokens_stay_forbidden_under_bias_and_penalties() -> None:
    params = SamplingParams(
        max_tokens=8, min_tokens=3, stop_token_ids=(4,), logit_bias=((4, 100.0),), repetition_penalty=0.5,
        presence_penalty=-2, frequency_penalty=-2,
    )  # fmt: skip
    assert process_logits(random_logits(0), [row(params, [4], [4])])[0, 4] == NEG_INF


@settings(deadline=None, max_examples=150)
@given(seed=seeds, many=st.lists(st.tuples(any_params, token_lists, token_lists), min_size=2, max_size=6))
def test_a_mixed_batch_equals_its_rows_computed_singly(
    seed: int, many: list[tuple[SamplingParams, list[int], list[int]]]
) -> None:
    rows = [row(*each) for each in many]
    logits = random_logits(seed, len(rows))
    before = logits.clone()
    together = process_logits(logits, rows)
    for index, single in enumerate(rows):
        assert torch.equal(together[index], process_logits(logits[index : index + 1], [single])[0])
    assert torch.equal(logits, before), "the input must not change"


def test_plain_greedy_rows_are_unchanged_beside_sampled_ones() -> None:
    logits = random_logits(0, 3)
    greedy = SamplingParams(temperature=0, top_k=1, top_p=0.1, min_p=0.9)
    processed = process_logits(logits, [row(greedy), row(SamplingParams(top_k=2)), row(greedy)])
    assert torch.equal(processed[0], logits[0])
    assert torch.equal(processed[2], logits[2])
    assert int(torch.isfinite(processed[1]).sum()) == 2
    assert process_logits(logits, [row(greedy)] * 3) is logits


def test_ties_at_the_kth_place_are_all_kept() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0]])
    assert torch.isfinite(process_logits(logits, [row(SamplingParams(top_k=2))]))[0].tolist() == [
        False, True, True, True, False,
    ]  # fmt: skip


def test_a_tiny_temperature_is_greedy_and_not_infinite() -> None:
    for temperature in (1e-20, 1e-40, 5e-324):
        processed = process_logits(random_logits(0), [row(SamplingParams(temperature=temperature))])
        assert not bool(processed.isnan().any())
        assert not bool((processed == float("inf")).any())
        assert processed.softmax(-1)[0, random_logits(0).argmax()] == 1


def mass_before_each(logits: torch.Tensor) -> torch.Tensor:
    """The probability of all likelier tokens (of equal ones: the earlier ones), by a stable sort of the whole row."""
    ordered, order = logits.sort(descending=True, stable=True)
    probs = torch.softmax(ordered.double(), dim=-1)
    return torch.empty_like(probs).scatter_(0, order, probs.cumsum(dim=-1) - probs)


@settings(deadline=None, max_examples=60)
@given(
    seed=seeds,
    spread=st.sampled_from([0.0, 0.3, 3.0, 8.0]),
    top_p=st.sampled_from([0.0, 0.0137, 0.3137, 0.5003, 0.9513, 0.9997]),
    step=st.sampled_from([None, 0.5]),
)
def test_top_p_of_a_large_vocabulary_matches_the_sorted_row(
    seed: int, spread: float, top_p: float, step: float | None
) -> None:
    """Flat rows need the whole vocabulary, steep ones a few tokens; ``step`` makes ties at the edge."""
    logits = torch.randn(1, 5000, generator=torch.Generator().manual_seed(seed)) * spread
    if step is not None:
        logits = (logits / step).round() * step
    kept = process_logits(logits, [row(SamplingParams(top_p=top_p))])[0] > NEG_INF
    before = mass_before_each(logits[0])
    different = kept ^ (before < top_p)
    distance = (before[different] - top_p).abs()
    assert bool((distance < 2e-6).all()), "only sums that float32 cannot tell from top_p may fall on the other side"


@given(seeds, st.lists(st.one_of(st.none(), st.sets(tokens, min_size=1)), min_size=1, max_size=4), any_params)
@settings(deadline=None)
def test_a_grammar_leaves_only_its_tokens(seed: int, allowed: list[set[int] | None], params: SamplingParams) -> None:
    logits = random_logits(seed, len(allowed))
    rows = [replace(row(params), allowed=None if only is None else packed(only)) for only in allowed]
    processed = process_logits(logits, rows)
    for own, before, only in zip(processed, logits, allowed, strict=True):
        masked = before.clone()
        if only is not None:
            masked[[token for token in range(VOCAB_SIZE) if token not in only]] = NEG_INF
        torch.testing.assert_close(own, process_logits(masked[None], [row(params)])[0])


def packed(allowed: set[int]) -> npt.NDArray[np.int32]:
    """The bits of a set of tokens."""
    bits = np.zeros(-(-VOCAB_SIZE // 32) * 32, dtype=np.uint8)
    bits[list(allowed)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def test_masks_are_the_same_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [replace(row(SamplingParams()), allowed=mask) for mask in (packed({1, 40}), None, packed({49}))]
    on_host = process_logits(random_logits(3, 3), rows)
    monkeypatch.setattr(logits_module, "is_on_host", lambda tensor: False)
    torch.testing.assert_close(process_logits(random_logits(3, 3), rows), on_host)
    assert torch.isfinite(on_host).sum(dim=-1).tolist() == [2, VOCAB_SIZE, 1]
