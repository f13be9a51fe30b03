"""The router alone, in front of simulated workers: ``python -m benchmarks.router_load [--help]``."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from baton.core.errors import ConfigError
from benchmarks.options import run_command
from benchmarks.router_load.command import RouterLoadSettings, run
from benchmarks.router_load.measure import LatencySettings
from cluster.cli.cli_reporter import error_console, print_report

_SIZE = re.compile(r"([1-9][0-9]{0,2})\+([1-9][0-9]{0,2})")


def command(
    rate: Annotated[
        float, typer.Option(min=1, max=2000, help="Rate of one-token requests per second (open loop).")
    ] = 200.0,
    requests: Annotated[int, typer.Option(min=10, help="Number of measured requests for each cluster size.")] = 3000,
    sizes: Annotated[
        str, typer.Option(metavar="P+D,…", help="Cluster sizes: numbers of simulated prefill and decode workers.")
    ] = "1+1,16+48",
    streams: Annotated[int, typer.Option(min=1, max=4000, help="Number of streams whose tokens are relayed.")] = 64,
    tokens: Annotated[int, typer.Option(min=1, max=4000, help="Tokens per stream, one per message.")] = 400,
    open_streams: Annotated[
        int, typer.Option(min=1, max=4000, help="Number of concurrent streams with one token per second each.")
    ] = 2000,
    runs: Annotated[int, typer.Option(min=1, help="Runs of every measurement; medians are shown.")] = 1,
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Write a cProfile profile of the router to this folder. Profiling slows it down."
        ),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all figures to this file.")
    ] = None,
) -> None:
    """Measure the router alone: added latency, relayed tokens, open streams, memory. Workers are simulated.

    Starts its own processes on this machine, without Ray. Nothing else should run on it for about two minutes.
    """
    settings = RouterLoadSettings(
        latency=LatencySettings(rate, requests, parse_sizes("--sizes", sizes)),
        relay_streams=streams,
        relay_tokens=tokens,
        open_streams=open_streams,
        runs=runs,
        profile=profile,
    )
    errors = error_console()
    print_report(run(settings, lambda line: errors.print(line, markup=False), json_file))


def parse_sizes(option: str, text: str) -> tuple[tuple[int, int], ...]:
    """Parses ``"1+1,16+48"`` into ``((1, 1), (16, 48))``.

    Raises:
        ConfigError: a part is not ``PREFILL+DECODE``.
    """
    matches = [_SIZE.fullmatch(part.strip()) for part in text.split(",")]
    if None in matches:
        raise ConfigError(
            f"{option} must be prefill+decode workers separated by commas, such as 1+1,16+48; got {text!r}."
        )
    return tuple((int(match[1]), int(match[2])) for match in matches if match is not None)


if __name__ == "__main__":
    sys.exit(run_command(command, "benchmarks.router_load"))
