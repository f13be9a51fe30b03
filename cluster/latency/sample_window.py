"""The samples that a fit is made from: the newest of every kind, so that rare kinds outlive a thousand common ones."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import frexp
from typing import NamedTuple

import numpy as np

from cluster.latency.robust_fit import Floats

_PER_CELL = 12
_MAX_CELLS = 24
"""Of each mixture of features that are not zero: prompts alone, decoding alone, and so on."""
_HALF_LIFE_S = 120.0
_HALF_LIFE_SAMPLES = 96.0
_SMALLEST_WEIGHT = 0.02
"""Of old samples: of some kinds there are no others, and they still say how kinds compare."""

Features = tuple[float, ...]


class _Row(NamedTuple):
    added_s: float
    number: int
    ms: float
    features: Features


@dataclass(slots=True)
class _Mixture:
    """Samples of which the same features are above zero."""

    cells: OrderedDict[tuple[int, ...], deque[_Row]] = field(default_factory=OrderedDict)
    num_added: int = 0

    def rows(self) -> Iterator[tuple[float, int, float, Features]]:
        """Of each sample: when it came, how many came after it, milliseconds and features."""
        for cell in self.cells.values():
            for row in cell:
                yield row.added_s, self.num_added - row.number, row.ms, row.features


class SampleWindow:
    """Samples by the sizes of their features, in powers of two: a few of each cell, and the cells used last."""

    def __init__(self) -> None:
        self._mixtures: dict[tuple[bool, ...], _Mixture] = {}

    def add(self, features: Features, ms: float, now_s: float) -> None:
        mixture = self._mixtures.setdefault(tuple(value > 0 for value in features), _Mixture())
        key = tuple(frexp(value)[1] for value in features)
        cell = mixture.cells.get(key)
        if cell is None:
            cell = mixture.cells[key] = deque(maxlen=_PER_CELL)
            if len(mixture.cells) > _MAX_CELLS:
                mixture.cells.popitem(last=False)
        else:
            mixture.cells.move_to_end(key)
        mixture.num_added += 1
        cell.append(_Row(now_s, mixture.num_added, ms, features))

    def table(self, now_s: float) -> tuple[Floats, Floats, Floats]:
        """Features ``[n, k]``, milliseconds ``[n]`` and weights ``[n]``.

        Weights halve with age, and with the number of newer samples of the same mixture.
        """
        rows = (row for mixture in self._mixtures.values() for row in mixture.rows())
        times, num_newer, ms, features = zip(*rows, strict=True)
        half_lives = np.maximum(now_s - np.array(times), 0.0) / _HALF_LIFE_S
        half_lives += np.array(num_newer) / _HALF_LIFE_SAMPLES
        weights = np.maximum(0.5**half_lives, _SMALLEST_WEIGHT)
        return np.array(features), np.array(ms), weights
