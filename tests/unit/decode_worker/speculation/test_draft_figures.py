"""What a worker measures of its drafts."""

from __future__ import annotations

import pytest

from baton.core.drafts import ROOT, Draft
from baton.core.request import Request, SamplingParams
from baton.core.workloads import LONG_PROMPT_TOKENS, Workload
from decode_worker.speculation.draft_figures import (
    DraftFigures,
    KindCounts,
    RecentMean,
    num_reached,
    traffic_kind,
)

GREEDY, WARM = (0, Workload.SHORT_PROMPT), (2, Workload.LONG_PROMPT)


@pytest.mark.parametrize(
    ("draft", "path", "expected"),
    [
        (Draft((1, 2, 3)), (), 1),
        (Draft((1, 2, 3)), (0, 1), 3),
        (Draft((1, 2, 3)), (0, 1, 2), 3),
        (Draft((1, 2, 3, 4), (ROOT, ROOT, 0, 2)), (), 1),
        (Draft((1, 2, 3, 4), (ROOT, ROOT, 0, 2)), (1,), 1),
        (Draft((1, 2, 3, 4), (ROOT, ROOT, 0, 2)), (0,), 2),
        (Draft((1, 2, 3, 4), (ROOT, ROOT, 0, 2)), (0, 2, 3), 3),
    ],
)
def test_a_position_is_reached_when_all_before_it_were_accepted(draft: Draft, path: tuple[int, ...], expected: int):
    assert num_reached(draft, path) == expected


def test_acceptance_is_counted_by_position():
    figures = DraftFigures()
    figures.judged(GREEDY, 3, 0, 1)
    figures.judged(GREEDY, 3, 2, 3)
    figures.judged(WARM, 2, 2, 2)
    assert (figures.num_drafts, figures.num_drafted, figures.num_accepted) == (3, 8, 4)
    assert (figures.reached, figures.accepted) == ([3, 2, 1], [2, 2, 0])
    assert [mean.value for mean in figures.recent_acceptance] == pytest.approx([2 / 3, 1.0, 0.0])


def test_acceptance_is_counted_by_kind_of_request():
    figures = DraftFigures()
    figures.judged(GREEDY, 3, 0, 1)
    figures.judged(GREEDY, 3, 2, 3)
    figures.judged(WARM, 2, 2, 2)
    assert figures.kinds == {GREEDY: KindCounts(2, 4, 2), WARM: KindCounts(1, 2, 2)}


@pytest.mark.parametrize(
    ("num_tokens", "temperature", "grammar", "expected"),
    [
        (3, 0.0, "", GREEDY),
        (LONG_PROMPT_TOKENS, 0.8, "", WARM),
        (LONG_PROMPT_TOKENS, 0.7, "{}", (1, Workload.GRAMMAR)),
    ],
)
def test_the_kind_of_a_request(num_tokens: int, temperature: float, grammar: str, expected: tuple[int, Workload]):
    params = SamplingParams(temperature=temperature, grammar=grammar)
    assert traffic_kind(Request("one", [1] * num_tokens, params)) == expected


def test_recent_means_forget():
    mean = RecentMean()
    for _ in range(600):
        mean.observe(0.0)
    assert mean.value == 0.0
    for _ in range(2000):
        mean.observe(1.0)
    assert mean.value > 0.9


def test_costs_are_relative_to_a_step_without_drafts():
    figures = DraftFigures()
    for _ in range(10):  # four sequences, two tokens each; a pass over all of them takes 1 ms of 10
        figures.cost(4, drafting_ms=2.0, verifying_ms=0.1, plain_ms=10.0, num_tokens=8)
    drafting, verifying = figures.costs[3].per_token()
    assert drafting == pytest.approx(0.1)
    assert verifying == pytest.approx(0.04)


def test_searches_without_a_find_make_tokens_dearer():
    figures = DraftFigures()
    figures.cost(1, drafting_ms=1.0, verifying_ms=0.0, plain_ms=10.0, num_tokens=1)
    figures.cost(1, drafting_ms=1.0, verifying_ms=0.0, plain_ms=10.0, num_tokens=0)
    assert figures.costs[1].per_token()[0] == pytest.approx(0.2, rel=0.01)


def test_lengths_that_were_chosen_are_counted():
    figures = DraftFigures()
    for length in (2, 5, 2):
        figures.chose(length)
    assert figures.chosen == [0, 2, 0, 0, 1]
