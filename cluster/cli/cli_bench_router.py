"""``baton bench router``: reads options. The benchmark is named by string, as in :mod:`cluster.cli.cli_bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cluster.cli.cli_bench import REPORT_COLUMNS, load_benchmark

_ENTRY = "benchmarks.router_load.entry:run"


def bench_router(
    rate: Annotated[float, typer.Option(min=1, max=2000, help="One-token requests per second, open loop.")] = 200.0,
    requests: Annotated[int, typer.Option(min=10, help="That are measured, for each size of the cluster.")] = 3000,
    sizes: Annotated[str, typer.Option(metavar="P+D,…", help="Prefill and decode workers, simulated.")] = "1+1,16+48",
    streams: Annotated[int, typer.Option(min=1, max=4000, help="Streams whose tokens are relayed.")] = 64,
    tokens: Annotated[int, typer.Option(min=1, max=4000, help="Of each stream, at one per message.")] = 400,
    open_streams: Annotated[
        int, typer.Option(min=1, max=4000, help="Streams that are open at once, with a token a second each.")
    ] = 2000,
    runs: Annotated[int, typer.Option(min=1, help="Of every measurement; medians are shown.")] = 1,
    profile: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write what cProfile sees in the router, which slows it down.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Every figure.")] = None,
) -> None:
    """Measure the router alone: added latency, relayed tokens, open streams, memory. Workers are simulated.

    Starts processes of its own on this machine, without Ray, and wants the machine for itself for about two minutes.
    """
    options = {key: value for key, value in locals().items() if key != "json_file"}
    errors = Console(stderr=True)
    shown = load_benchmark(_ENTRY)(options, lambda line: errors.print(line, markup=False), json_file)
    Console(width=max(Console().width, REPORT_COLUMNS)).print(shown)
