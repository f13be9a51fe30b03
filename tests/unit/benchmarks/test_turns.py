"""Works take turns, and ratios are those of neighbours."""

from __future__ import annotations

from benchmarks.ceilings import median_ratio
from benchmarks.turns import in_turn


def test_works_take_turns_and_warm_up() -> None:
    calls: list[str] = []

    def work(name: str) -> float:
        calls.append(name)
        return len(calls)

    results = in_turn({"a": lambda: work("a"), "b": lambda: work("b")}, 3)
    assert calls == ["a", "b"] * 5
    assert results == {"a": [5, 7, 9], "b": [6, 8, 10]}
    assert median_ratio(results["b"], results["a"]) == 8 / 7
