"""The verdict on two tenants: caches that show, in counts or in times, are found."""

from __future__ import annotations

import random

import pytest

from benchmarks.tenant_isolation import Answers, is_isolated, show


def times(mean_s: float, seed: int) -> list[float]:
    chance = random.Random(seed)
    return [chance.gauss(mean_s, 0.01) for _ in range(200)]


def answers(foreign_s: float = 0.1, own_s: float = 0.05, foreign_cached: int = 0) -> dict[str, Answers]:
    return {
        "first": Answers(times(0.1, 1), [0] * 200),
        "own": Answers(times(own_s, 2), [96] * 200),
        "new": Answers(times(0.1, 3), [0] * 200),
        "foreign": Answers(times(foreign_s, 4), [0] * 199 + [foreign_cached]),
    }


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (answers(), True),
        (answers(foreign_s=0.12), True),  # longer times tell nothing of a cache
        (answers(foreign_s=0.095), False),
        (answers(foreign_cached=16), False),
        (answers(own_s=0.1), False),  # a cached prompt would not have been noticed
    ],
)
def test_what_a_tenant_could_notice_is_found(found: dict[str, Answers], expected: bool) -> None:
    assert is_isolated(found) is expected


def test_the_table_counts_cached_requests() -> None:
    assert show(answers(foreign_cached=16)).row_count == 4
