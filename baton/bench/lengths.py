"""How many tokens a prompt or an answer shall have: distributions, and the text that names them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from baton.core.errors import ConfigError
from baton.core.option_text import key_values, known_name, positive_integer, positive_number

_Z95 = 1.6448536269514722
"""The 95th percentile of the standard normal distribution."""
MAX_LENGTH = 10_000_000
"""In tokens. No model takes more, and to write such a prompt would take minutes."""
_MAX_SIGMA = 10.0


class LengthDistribution(Protocol):
    """Draws lengths in tokens, each of them at least 1."""

    def sample(self, rng: np.random.Generator) -> int: ...

    def mean(self) -> float: ...

    def describe(self) -> str:
        """The distribution in words, for the report."""
        ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always ``tokens``."""

    tokens: int

    def sample(self, rng: np.random.Generator) -> int:
        return self.tokens

    def mean(self) -> float:
        return float(self.tokens)

    def describe(self) -> str:
        return f"always {self.tokens}"


@dataclass(frozen=True, slots=True)
class Uniform:
    """Whole numbers from ``low`` to ``high``, both included, equally likely."""

    low: int
    high: int

    def sample(self, rng: np.random.Generator) -> int:
        return int(rng.integers(self.low, self.high, endpoint=True))

    def mean(self) -> float:
        return (self.low + self.high) / 2

    def describe(self) -> str:
        return f"uniform {self.low}-{self.high}"


@dataclass(frozen=True, slots=True)
class Lognormal:
    """``exp(N(mu, sigma))``, rounded, at most :data:`MAX_LENGTH`. Lengths of real traffic are close to it.

    Attributes:
        mu: mean of the logarithm, which is the logarithm of the median.
        sigma: standard deviation of the logarithm.
    """

    mu: float
    sigma: float

    @classmethod
    def from_median_and_p95(cls, median: float, p95: float) -> Lognormal:
        """
        Raises:
            ConfigError: ``p95`` is not over ``median``.
        """
        if p95 <= median:
            raise ConfigError(f"lognormal: p95 ({p95:g}) must be over the median ({median:g}).")
        return cls(math.log(median), math.log(p95 / median) / _Z95)

    @classmethod
    def from_mean_and_sigma(cls, mean: float, sigma: float) -> Lognormal:
        """``mean`` in tokens; ``sigma`` of the logarithm, as in the class."""
        return cls(math.log(mean) - sigma**2 / 2, sigma)

    def sample(self, rng: np.random.Generator) -> int:
        return max(1, round(min(float(rng.lognormal(self.mu, self.sigma)), MAX_LENGTH)))

    def mean(self) -> float:
        """At most the longest length: an exponential of that many sigmas may be no number."""
        return math.exp(min(self.mu + self.sigma**2 / 2, math.log(MAX_LENGTH)))

    def describe(self) -> str:
        p95 = math.exp(self.mu + _Z95 * self.sigma)
        return f"lognormal, median {math.exp(self.mu):.0f}, p95 {p95:.0f}"


class Empirical:
    """Draws from observed lengths, with replacement."""

    def __init__(self, lengths: NDArray[np.int64], source: str) -> None:
        self._lengths = lengths
        self._source = source

    def sample(self, rng: np.random.Generator) -> int:
        return int(rng.choice(self._lengths))

    def mean(self) -> float:
        return float(self._lengths.mean())

    def describe(self) -> str:
        return f"{len(self._lengths)} lengths of {self._source}, median {np.median(self._lengths):.0f}"


def parse_lengths(option: str, text: str) -> LengthDistribution:
    """The distribution that ``text`` names.

    ``512``, ``fixed:512``, ``uniform:100-400``, ``lognormal:median=200,p95=800``, ``lognormal:mean=300,sigma=0.9``,
    ``file:PATH`` (one length a line).

    Raises:
        ConfigError: none of these, a length over :data:`MAX_LENGTH`, or the file cannot be read; names ``option``.
    """
    kind, separator, values = text.strip().partition(":")
    if not separator:
        kind, values = "fixed", kind
    return _PARSERS[known_name(option, kind, _PARSERS)](option, values)


def _parse_fixed(option: str, values: str) -> LengthDistribution:
    return Fixed(_length(option, values))


def _parse_uniform(option: str, values: str) -> LengthDistribution:
    low, separator, high = values.partition("-")
    if not separator:
        raise ConfigError(f"{option}: uniform takes LOW-HIGH, such as uniform:100-400; got {values!r}.")
    uniform = Uniform(_length(option, low), _length(option, high))
    if uniform.low > uniform.high:
        raise ConfigError(f"{option}: the lower end of uniform:{values} is over the upper end. Swap them.")
    return uniform


def _parse_lognormal(option: str, values: str) -> LengthDistribution:
    given = key_values(option, values, ("median", "p95", "mean", "sigma"))
    numbers = {key: positive_number(f"{option} {key}", value) for key, value in given.items()}
    if (sigma := numbers.get("sigma", 0.0)) > _MAX_SIGMA:
        raise ConfigError(f"{option} sigma: {sigma:g} is more than {_MAX_SIGMA:g}. It is that of the logarithm.")
    for key in numbers.keys() - {"sigma"}:
        check_length(f"{option} {key}", numbers[key])
    if numbers.keys() == {"median", "p95"}:
        return Lognormal.from_median_and_p95(numbers["median"], numbers["p95"])
    if numbers.keys() == {"mean", "sigma"}:
        return Lognormal.from_mean_and_sigma(numbers["mean"], numbers["sigma"])
    raise ConfigError(f"{option}: lognormal takes either median and p95 or mean and sigma; got {values!r}.")


def _parse_file(option: str, values: str) -> LengthDistribution:
    path = Path(values).expanduser()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option}: cannot read {path}: {error}.") from error
    lengths = [_length(f"{option}: {path}", line) for line in lines if line.strip()]
    if not lengths:
        raise ConfigError(f"{option}: {path} holds no lengths. Expected one whole number a line.")
    return Empirical(np.array(lengths, dtype=np.int64), path.name)


def check_length(option: str, tokens: float) -> None:
    """Raises :class:`ConfigError` for more than :data:`MAX_LENGTH` tokens."""
    if tokens > MAX_LENGTH:
        raise ConfigError(f"{option}: {tokens:.0f} tokens are more than {MAX_LENGTH}, which is too long. Lower it.")


def _length(option: str, text: str) -> int:
    tokens = positive_integer(option, text)
    check_length(option, tokens)
    return tokens


_PARSERS: Mapping[str, Callable[[str, str], LengthDistribution]] = {
    "fixed": _parse_fixed,
    "uniform": _parse_uniform,
    "lognormal": _parse_lognormal,
    "file": _parse_file,
}
