"""Tokens per decode step, by size of the batch, since larger batches speculate less. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from types import MappingProxyType
from typing import NamedTuple

_KEEP = 0.5 ** (1 / 128)
"""Decay of the sums at each step: a memory of about two answers, since texts differ in how well they can be drafted."""
_PRIOR_SEQUENCES = 6.0
"""Weight of a prior rate, in sequences of one step."""
_ROUNDING = 1e-6
ALL_SIZES = 0
"""Size class of the sums over all batches."""


class RateSums(NamedTuple):
    """Exponentially weighted sums over steps: sequences that decoded, tokens that they got, and tokens drafted."""

    decoding: float
    emitted: float
    drafted: float

    def is_plausible(self) -> bool:
        """Whether there may be such steps."""
        return all(isfinite(value) and value >= 0 for value in self) and self.decoding <= (1 + _ROUNDING) * self.emitted


_NONE = RateSums(0.0, 0.0, 0.0)


def size_class(batch: int) -> int:
    """Key of the sums of a batch: sizes up to the next power of two share one."""
    return batch.bit_length()


class SpeculationRates:
    """Tokens emitted and tokens drafted, per decoding sequence and step.

    Args:
        sums: by :func:`size_class`, and of all steps under :data:`ALL_SIZES`.
    """

    def __init__(self, sums: Mapping[int, RateSums] = MappingProxyType({})) -> None:
        self.sums = dict(sums)

    def rates(self, batch: int, otherwise: tuple[float, float] = (1.0, 0.0)) -> tuple[float, float]:
        """Returns (tokens emitted, tokens drafted), each per sequence and step of ``batch`` sequences.

        Args:
            batch: 0 asks for the rates of all steps.
            otherwise: rates that few measurements are blended with.
        """
        for size in dict.fromkeys((ALL_SIZES, size_class(batch))):
            if (sums := self.sums.get(size)) is not None:
                otherwise = _blended(sums, otherwise)
        return otherwise

    def observe(self, decoding: int, emitted: int, drafted: int) -> None:
        """Learns from a step, given its sequences that decoded, the tokens that they got, and those drafted for them.

        Ignores an impossible step.
        """
        if not 0 < decoding <= emitted <= decoding + drafted:
            return
        for size in (ALL_SIZES, size_class(decoding)):
            old = self.sums.get(size, _NONE)
            self.sums[size] = RateSums(
                _KEEP * old.decoding + decoding, _KEEP * old.emitted + emitted, _KEEP * old.drafted + drafted
            )

    def copy(self) -> SpeculationRates:
        return SpeculationRates(self.sums)

    def moved_to(self, newer: SpeculationRates, share: float) -> SpeculationRates:
        """The mean of both, with weight ``share`` for the newer one; sizes that only one of them knows are its own."""
        mixed = {
            size: RateSums(*(old + share * (new - old) for old, new in zip(self.sums[size], sums, strict=True)))
            for size, sums in newer.sums.items()
            if size in self.sums
        }
        return SpeculationRates({**self.sums, **newer.sums, **mixed})


def _blended(sums: RateSums, otherwise: tuple[float, float]) -> tuple[float, float]:
    known = sums.decoding + _PRIOR_SEQUENCES
    tokens, drafted = otherwise
    return (sums.emitted + _PRIOR_SEQUENCES * tokens) / known, (sums.drafted + _PRIOR_SEQUENCES * drafted) / known
