"""Rounds: where each token came from, and a log that keeps the first of them in few bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.rounds import MAX_ROUNDS, Round, RoundLog, Verdict

TREE = (-1, 0, -1, 2)


@pytest.mark.parametrize(
    ("accepted", "verdicts"),
    [
        ((), ("recovered",)),
        ((0,), ("accepted", "recovered")),
        ((2, 3), ("accepted", "accepted", "bonus")),
    ],
)
def test_the_last_token_is_a_bonus_only_behind_a_leaf(accepted: tuple[int, ...], verdicts: tuple[str, ...]) -> None:
    found = Round((9,) * (len(accepted) + 1), "medusa", (9, 9, 9, 9), TREE, accepted)
    assert found.verdicts == verdicts


def test_a_round_without_a_draft_has_a_plain_token() -> None:
    assert Round((9,)).verdicts == (Verdict.PLAIN,)


def test_an_answer_may_end_within_its_accepted_tokens() -> None:
    assert Round((5,), "suffix", (5, 6), (-1, 0), (0, 1)).verdicts == (Verdict.ACCEPTED,)


def test_a_round_as_json() -> None:
    found = Round((5, 8), "eagle3", (5, 7, 6), (-1, 0, -1), (0,), 0.0012346, 0.0150004, 3)
    assert found.to_dict() == {
        "method": "eagle3",
        "draft": {"token_ids": [5, 7, 6], "parents": [-1, 0, -1], "accepted": [True, False, False]},
        "output": {"token_ids": [5, 8], "verdicts": ["accepted", "recovered"]},
        "draft_ms": 1.235,
        "verify_ms": 15.0,
        "batch_sequences": 3,
    }
    assert Round((5,)).to_dict()["method"] is None


@st.composite
def rounds(draw: st.DrawFn) -> Round:
    ids = st.integers(0, 2**32 - 1)
    draft = draw(st.lists(ids, max_size=5))
    nodes = range(len(draft))
    return Round(
        tuple(draw(st.lists(ids, max_size=3))),
        draw(st.sampled_from(["", "suffix", "medusa"])),
        tuple(draft),
        tuple(draw(st.integers(-1, node - 1)) for node in nodes),
        tuple(draw(st.lists(st.sampled_from(nodes), max_size=4))) if draft else (),
        draw(st.floats(0, 10)),
        draw(st.floats(0, 10)),
        draw(st.integers(1, 2**32 - 1)),
    )


@given(st.lists(rounds(), max_size=4), st.integers(0, 4))
def test_a_log_returns_the_first_rounds_and_counts_the_others(found: list[Round], limit: int) -> None:
    log = RoundLog(limit)
    for one in found:
        log.add(one)
    assert list(log) == found[:limit]
    assert len(log) == min(limit, len(found))
    assert log.to_dict() == {
        "rounds": [one.to_dict() for one in found[:limit]],
        "left_out": max(0, len(found) - limit),
    }


def test_a_full_log_of_ordinary_rounds_takes_little_memory() -> None:
    log = RoundLog()
    for _ in range(2 * MAX_ROUNDS):
        log.add(Round((1, 2, 3), "eagle3", (7,) * 16, tuple(range(-1, 15)), (0, 1)))
    sizes = [cells.buffer_info()[1] * cells.itemsize for cells in (log._numbers, log._times_s)]
    assert sum(sizes) < 200 * MAX_ROUNDS
    assert log.num_left_out == MAX_ROUNDS
