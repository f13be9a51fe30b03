"""The exact distribution of a program's result over its uniform random numbers.

While ``law_of`` runs a program, ``uniform`` returns undetermined numbers. Wherever the program uses one, by ``u < x``
or by drawing a token, the program is run once for each possible outcome, and the number's interval is narrowed. The
lengths of the intervals are the probabilities, so the program is integrated exactly, without sampling. A number keeps
its interval during a run, so that noise that is used twice is noticed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar
from unittest import mock

import torch

_MAX_RUNS = 100_000

Outcome = TypeVar("Outcome", bound=Hashable)
Key = tuple[int, int, int]


@dataclass(slots=True)
class Search:
    """Explores all outcomes, depth first: every run repeats the choices of the previous run up to the last one that has
    another outcome.
    """

    choices: list[list[tuple[int, float]]] = field(default_factory=list)
    """For each choice of this run, the outcomes left to try with their probabilities, the current one first."""
    intervals: dict[Key, tuple[float, float]] = field(default_factory=dict)
    weight: float = 1.0
    _depth: int = 0

    def begin(self) -> None:
        self.intervals, self.weight, self._depth = {}, 1.0, 0

    def next(self) -> bool:
        """Advances to the next run; False when there is none."""
        while self.choices and len(self.choices[-1]) == 1:
            self.choices.pop()
        if self.choices:
            self.choices[-1].pop(0)
        return bool(self.choices)

    def choose(self, options: Sequence[tuple[int, float]]) -> int:
        if self._depth == len(self.choices):
            self.choices.append(list(options))
        option, probability = self.choices[self._depth][0]
        self._depth += 1
        self.weight *= probability
        return option

    def interval(self, key: Key) -> tuple[float, float]:
        return self.intervals.setdefault(key, (0.0, 1.0))

    def is_below(self, key: Key, threshold: float, *, inclusive: bool) -> bool:
        """Whether a number is less than ``threshold``, or equal to it if ``inclusive``.

        The lower end of the interval has probability 0 but is possible, so it is tried too.
        """
        low, high = self.interval(key)
        if threshold >= high:
            return True
        if threshold < low or (threshold == low and not inclusive):
            return False
        middle = max(threshold, math.nextafter(low, 1.0))
        share = 0.0 if threshold == low else (middle - low) / (high - low)
        below = bool(self.choose([(0, 1 - share), (1, share)]))
        self.intervals[key] = (low, middle) if below else (middle, high)
        return below

    def pick(self, key: Key, weights: torch.Tensor) -> int:
        """Draws an index by inverse transform: index i if the number is between the sums before and including i."""
        low, high = self.interval(key)
        ends = (weights.cumsum(dim=-1) / weights.sum()).tolist()
        last = max(index for index, weight in enumerate(weights.tolist()) if weight > 0)
        cells: list[tuple[int, float, float]] = []
        start = 0.0
        for index, end in enumerate(ends):
            left, right = max(low, start), min(high, 1.0 if index == last else end)
            if right > left:
                cells.append((index, left, right))
            start = end
        picked = self.choose([(place, (right - left) / (high - low)) for place, (_, left, right) in enumerate(cells)])
        index, left, right = cells[picked]
        self.intervals[key] = (left, right)
        return index


class Unknown(float):
    """A uniform random number that is determined when it is used."""

    search: Search
    key: Key

    def __lt__(self, other: float) -> bool:
        return self.search.is_below(self.key, float(other), inclusive=False)

    def __le__(self, other: float) -> bool:
        return self.search.is_below(self.key, float(other), inclusive=True)

    def __gt__(self, other: float) -> bool:
        return not self <= other

    def __ge__(self, other: float) -> bool:
        return not self < other

    def __eq__(self, other: object) -> bool:
        raise TypeError("a random number is compared by < only")

    __hash__ = float.__hash__


def law_of(program: Callable[[], Outcome]) -> dict[Outcome, float]:
    """The probability of each possible result of ``program``, including those of probability 0.

    Raises:
        RuntimeError: there are too many runs.
    """
    search = Search()
    found: dict[Outcome, float] = {}
    with _decided_by(search):
        for _ in range(_MAX_RUNS):
            search.begin()
            outcome = program()
            found[outcome] = found.get(outcome, 0.0) + search.weight
            if not search.next():
                return found
    raise RuntimeError(f"the program can go more than {_MAX_RUNS} ways")


@contextmanager
def _decided_by(search: Search) -> Iterator[None]:
    def uniform(seed: int, position: int, stream: int = 0) -> Unknown:
        number = Unknown(0.5)
        number.search, number.key = search, (seed, position, stream)
        return number

    def draw(probs: torch.Tensor, noise: Sequence[Unknown]) -> torch.Tensor:
        return torch.tensor([search.pick(number.key, row) for number, row in zip(noise, probs, strict=True)])

    with (
        mock.patch.multiple("baton.engine.sampling.sampler", uniform=uniform, draw=draw),
        mock.patch.multiple("decode_worker.speculation.acceptance_rules", uniform=uniform, draw=draw),
    ):
        yield
