"""Types of options for argparse, which names the option and what was given in its error."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


def at_least(least: int) -> Callable[[str], int]:
    """Whole numbers from ``least`` on."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least:
            raise argparse.ArgumentTypeError(f"must be a whole number of {least} or more, got {text!r}")
        return number

    return parse


def over_zero(text: str) -> float:
    """Finite numbers."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise argparse.ArgumentTypeError(f"must be a number over 0, got {text!r}")
    return number
