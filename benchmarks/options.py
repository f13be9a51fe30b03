"""Command lines of benchmarks: option types for argparse, whose errors name the option and the given value, the format
of help, and the execution of typer commands."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any


def run_command(command: Callable[..., None], name: str, arguments: Sequence[str] | None = None) -> int:
    """Runs a function whose parameters are typer options, as ``python -m name``.

    Args:
        arguments: the command line; ``None`` means that of this process.

    Returns:
        The exit status.
    """
    import typer  # imported late: a machine that only runs device_run may lack it

    from cluster.cli.cli_reporter import run_app

    app = typer.Typer(
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.command()(command)
    return run_app(app, sys.argv[1:] if arguments is None else arguments, f"python -m {name}")


def overrides_of(assignments: Iterable[str] | None, **given: object) -> dict[str, Any]:
    """Values of the configuration by dotted key: ``KEY=VALUE`` texts, then the given options.

    Args:
        given: values by key with ``__`` for the dot; ``None`` for an omitted option.
    """
    from cluster.config.config_reading import parse_override

    overrides: dict[str, Any] = dict(parse_override(text) for text in assignments or ())
    return overrides | {key.replace("__", "."): value for key, value in given.items() if value is not None}


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of descriptions, and shows defaults other than ``None`` and False."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, False) else super()._get_help_string(action)


def at_least(least: int) -> Callable[[str], int]:
    """An option type for whole numbers of at least ``least``."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least:
            raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}, got {text!r}")
        return number

    return parse


def positive_number(text: str) -> float:
    """An option type for finite positive numbers."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return number
