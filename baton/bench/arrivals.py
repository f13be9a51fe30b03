"""When requests are meant to be sent: fixed before the run, so that a slow server cannot delay the load."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from baton.core.errors import ConfigError
from baton.core.option_text import known_name

POISSON = "poisson"
BURSTY = "bursty"
CONSTANT = "constant"
TRACE = "trace"
ARRIVALS = (POISSON, BURSTY, CONSTANT, TRACE)

_Gaps = Callable[[np.random.Generator, float, float, int], NDArray[np.float64]]


def intended_times(
    process: str, rate: float, count: int, rng: np.random.Generator, burstiness: float = 1.0
) -> list[float]:
    """Seconds from the start of the load to each of ``count`` requests, ascending.

    Args:
        process: ``poisson``, ``bursty`` or ``constant``.
        rate: requests/s on average, over 0.
        burstiness: shape of the Gamma distribution of the gaps, for ``bursty``: 1 is Poisson, the variance of the
            gaps grows as it falls, and far over 1 they are all alike.

    Raises:
        ConfigError: the process is not one of these, or a number is not over 0.
    """
    gaps_of = _GAPS[known_name("--arrival", process, _GAPS)]
    if rate <= 0 or burstiness <= 0:
        raise ConfigError(f"--rate and --burstiness must be over 0; got {rate:g} and {burstiness:g}.")
    gaps = gaps_of(rng, rate, burstiness, count)
    return [float(moment) for moment in np.cumsum(gaps)]


def replayed_times(at_s: Sequence[float], speed_up: float) -> list[float]:
    """The trace's own times, ``speed_up`` times as fast.

    Raises:
        ConfigError: ``speed_up`` is not over 0.
    """
    if speed_up <= 0:
        raise ConfigError(f"--speed-up must be over 0; got {speed_up:g}.")
    return [moment / speed_up for moment in at_s]


def _poisson_gaps(rng: np.random.Generator, rate: float, burstiness: float, count: int) -> NDArray[np.float64]:
    return rng.exponential(1.0 / rate, count)


def _bursty_gaps(rng: np.random.Generator, rate: float, burstiness: float, count: int) -> NDArray[np.float64]:
    return rng.gamma(burstiness, 1.0 / (rate * burstiness), count)


def _constant_gaps(rng: np.random.Generator, rate: float, burstiness: float, count: int) -> NDArray[np.float64]:
    return np.full(count, 1.0 / rate)


_GAPS: Mapping[str, _Gaps] = {POISSON: _poisson_gaps, BURSTY: _bursty_gaps, CONSTANT: _constant_gaps}
