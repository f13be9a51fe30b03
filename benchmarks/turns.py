"""Works that take turns, so that a machine that slows down slows all of them."""

from __future__ import annotations

from collections.abc import Callable

_WARM_UPS = 2


def in_turn(works: dict[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """``A B A B``, and what each gave; the first rounds are not counted."""
    results: dict[str, list[float]] = {name: [] for name in works}
    for number in range(repeats + _WARM_UPS):
        for name, work in works.items():
            value = work()
            if number >= _WARM_UPS:
                results[name].append(value)
    return results
