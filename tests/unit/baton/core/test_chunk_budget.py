"""Prompt tokens in a step with decoding sequences stay within the TPOT targets, and are never zero."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.chunk_budget import MIN_PROMPT_TOKENS, PromptAllowance, prompt_allowance
from baton.core.step_costs import Pace, StepCosts
from tests.prompt_budget import prompt_budget

CPU = StepCosts(10.0, 0.5, 1e-4, 0.3, 5e-4, 0.5)
GPU = StepCosts(8.0, 0.02, 2e-6, 0.02, 1e-5, 0.01)

costs_of = st.builds(
    StepCosts, st.floats(0, 200), st.floats(0, 10), st.floats(0, 1e-2), st.floats(0, 10), st.floats(0, 1e-2),
    st.floats(0, 10),
)  # fmt: skip
steps_of = {
    "chunk_tokens": st.integers(1, 8192),
    "decoding": st.integers(0, 256),
    "context_tokens": st.integers(0, 1_000_000),
    "costs": costs_of,
    "start": st.integers(0, 100_000),
}


@given(target_s=st.floats(0, 10), **steps_of)
def test_a_budget_is_between_the_minimum_and_the_chunk(
    chunk_tokens: int,
    decoding: int,
    context_tokens: int,
    target_s: float,
    costs: StepCosts,
    start: int,
) -> None:
    budget = prompt_budget(chunk_tokens, decoding, context_tokens, target_s, costs, start=start)
    left = max(1, chunk_tokens - decoding)
    assert min(MIN_PROMPT_TOKENS, left) <= budget <= left


@given(targets_s=st.tuples(st.floats(1e-4, 10), st.floats(1e-4, 10)), **steps_of)
def test_a_looser_target_never_lowers_the_budget(
    chunk_tokens: int,
    decoding: int,
    context_tokens: int,
    targets_s: tuple[float, float],
    costs: StepCosts,
    start: int,
) -> None:
    strict, loose, none = (
        prompt_budget(chunk_tokens, decoding, context_tokens, target_s, costs, start=start)
        for target_s in (min(targets_s), max(targets_s), 0.0)
    )
    assert strict <= loose <= none == max(1, chunk_tokens - decoding)


@given(target_s=st.floats(1e-3, 1), **steps_of)
def test_a_step_meets_the_target_or_has_the_smallest_chunk(
    chunk_tokens: int,
    decoding: int,
    context_tokens: int,
    target_s: float,
    costs: StepCosts,
    start: int,
) -> None:
    budget = prompt_budget(chunk_tokens, decoding, context_tokens, target_s, costs, start=start)
    without_ms = costs.decode_ms(decoding, context_tokens)
    step_ms = without_ms + costs.chunk_ms(budget, start)
    in_time = step_ms <= max(target_s * 1e3, 1.1 * without_ms) * (1 + 1e-9) + 1e-6
    assert in_time or budget <= MIN_PROMPT_TOKENS or decoding == 0


def test_without_decoding_or_targets_the_budget_is_the_whole_chunk() -> None:
    assert prompt_budget(512, 0, 0, 0.05, CPU) == 512
    assert prompt_budget(512, 4, 4000, 0.0, CPU) == 508


def test_drafts_reduce_the_time_for_prompts() -> None:
    assert prompt_budget(512, 4, 4000, 0.05, CPU, drafted_tokens=3.0) < prompt_budget(512, 4, 4000, 0.05, CPU)


def test_several_tokens_per_round_do_not_lengthen_steps() -> None:
    alone, several = (prompt_allowance(508, 4, 4000, 0.05, Pace(CPU, tokens)) for tokens in (1.0, 2.5))
    assert alone == several


def test_a_longer_context_makes_a_chunk_more_expensive() -> None:
    assert prompt_budget(512, 4, 4000, 0.05, CPU, start=8000) < prompt_budget(512, 4, 4000, 0.05, CPU)


def test_an_impossible_target_does_not_starve_prompts() -> None:
    """On a GPU a tenth of the step is more than the smallest chunk."""
    assert prompt_budget(512, 4, 4000, 0.001, CPU) == MIN_PROMPT_TOKENS
    assert prompt_budget(2048, 64, 200_000, 0.001, GPU) > MIN_PROMPT_TOKENS


def test_prompts_share_an_allowance() -> None:
    allowance = prompt_allowance(508, 4, 4000, 0.05, Pace(CPU))
    first = allowance.tokens_at(0)
    allowance.take(first // 2, 0)
    second = allowance.tokens_at(3000)
    assert 0 < second < first - first // 2
    allowance.take(second, 3000)
    assert allowance.tokens_at(0) <= 1
    spent_ms = CPU.chunk_ms(first // 2, 0) + CPU.chunk_ms(second, 3000)
    assert CPU.decode_ms(4, 4000) + spent_ms <= 50.0


def test_a_certain_token_is_counted_once() -> None:
    allowance = PromptAllowance(100, ms=0.0, costs=CPU)
    assert allowance.tokens_at(0) == MIN_PROMPT_TOKENS
    allowance.take(10, 0)
    assert allowance.tokens_at(0) == MIN_PROMPT_TOKENS - 10
    allowance.take(6, 0)
    assert allowance.tokens_at(0) == 0


@pytest.mark.parametrize("costs", [StepCosts(1, 0, 0, 0, 0), StepCosts(0, 0, 0, 0, 0)])
def test_free_prompts_get_the_whole_budget(costs: StepCosts) -> None:
    assert prompt_budget(512, 2, 10, 0.05, costs) == 510
    assert PromptAllowance(7, inf).tokens_at(123) == 7
