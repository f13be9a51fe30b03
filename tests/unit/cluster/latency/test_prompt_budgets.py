"""What workers leave prompts beside decoding, as predictions and as the workers themselves reckon it."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from baton.core.step_costs import StepCosts
from cluster.latency.cost_table import prompt_budgets
from tests.prompt_budget import prompt_budget

rows = st.tuples(
    st.builds(
        StepCosts, st.floats(0, 200), st.floats(0, 10), st.floats(0, 1e-2), st.floats(0, 10), st.floats(0, 1e-2),
        st.floats(0, 10),
    ),
    st.integers(1, 8192),
    st.integers(0, 256),
    st.integers(0, 1_000_000),
    st.just(0.0) | st.floats(1e-3, 2.0),
    st.tuples(st.floats(1, 8), st.floats(0, 16)),
    st.integers(0, 100_000),
)  # fmt: skip


@given(st.lists(rows, min_size=1, max_size=8))
def test_many_workers_match_single_evaluations(
    workers: list[tuple[StepCosts, int, int, int, float, tuple[float, float], int]],
) -> None:
    costs, chunks, decoding, contexts, targets, rates, starts = zip(*workers, strict=True)
    many = prompt_budgets(
        np.array(costs).T,
        np.array(chunks, float),
        np.array(decoding, float),
        np.array(contexts, float),
        np.array(targets),
        np.array(rates),
        np.array(starts, float),
    )
    for budget, (cost, chunk, count, context, target, (_, drafted), start) in zip(many, workers, strict=True):
        one = prompt_budget(chunk, count, context, target, cost, drafted_tokens=drafted, start=start)
        assert abs(budget - one) <= 1  # where rounding decides
