"""Where ``baton bench router`` comes in: plain values of its options."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from baton.core.errors import ConfigError
from benchmarks.router_load import command
from benchmarks.router_load.command import RouterLoadSettings
from benchmarks.router_load.measure import LatencySettings, Report

_SIZE = re.compile(r"([1-9][0-9]{0,2})\+([1-9][0-9]{0,2})")


def run(options: Mapping[str, Any], report: Report, json_file: Path | None) -> RenderableType:
    """See :func:`benchmarks.router_load.command.run`. Raises :class:`ConfigError` for sizes that are none."""
    settings = RouterLoadSettings(
        latency=LatencySettings(options["rate"], options["requests"], parse_sizes("--sizes", options["sizes"])),
        relay_streams=options["streams"],
        relay_tokens=options["tokens"],
        open_streams=options["open_streams"],
        runs=options["runs"],
        profile=options["profile"],
    )
    return command.run(settings, report, json_file)


def parse_sizes(option: str, text: str) -> tuple[tuple[int, int], ...]:
    """``"1+1,16+48"`` → ``((1, 1), (16, 48))``.

    Raises:
        ConfigError: it is none of that kind.
    """
    matches = [_SIZE.fullmatch(part.strip()) for part in text.split(",")]
    if None in matches:
        raise ConfigError(
            f"{option} takes prefill+decode workers with commas between, such as 1+1,16+48; got {text!r}."
        )
    return tuple((int(match[1]), int(match[2])) for match in matches if match is not None)
