"""A factor that changes over time, for varying loads."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass

from baton.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Schedule:
    """A piecewise constant factor.

    Attributes:
        steps: (start in seconds, factor) in ascending order; the first one starts at 0.
    """

    steps: tuple[tuple[float, float], ...]

    @classmethod
    def constant(cls, factor: float) -> Schedule:
        return cls(((0.0, factor),))

    def at(self, seconds: float) -> float:
        factor = self.steps[0][1]
        for since_s, later in self.steps:
            if since_s > seconds:
                break
            factor = later
        return factor


def parse_schedule(option: str, text: str) -> Schedule:
    """Parses ``"2"`` or ``"0=1,600=4"``, which is 1 at first and 4 after 600 seconds.

    Raises:
        ConfigError: it is neither, a number is not finite, or a factor is not above 0. The text names ``option``.
    """
    steps: tuple[tuple[float, float], ...] = ()
    with suppress(ValueError):
        pairs = (part.split("=") for part in (text if "=" in text else f"0={text}").split(","))
        steps = tuple((float(since), float(factor)) for since, factor in pairs)
    moments = [since_s for since_s, _ in steps]
    is_finite = all(math.isfinite(number) for step in steps for number in step)
    is_ascending = moments[:1] == [0] and moments == sorted(set(moments))
    if not is_finite or not is_ascending or min(factor for _, factor in steps) <= 0:
        raise ConfigError(
            f"{option} must be a factor above 0, or several with their start times in seconds, such as "
            f"0=1,600=4,1200=1; got {text!r}."
        )
    return Schedule(steps)
