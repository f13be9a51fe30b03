"""Types of options for argparse, which names the option and what was given in its error; and how help is shown."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """The module's own lines, and every default that says something."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, False) else super()._get_help_string(action)


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
