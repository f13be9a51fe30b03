"""The report for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

_LEGEND = """\
Added: percentiles of whole HTTP requests minus the median of the same work sent directly to a worker over gRPC, in the
same run and by the same client. Clients, router and workers share this machine's cores, so they wait for each other;
"per core" is the rate of a router that has a core to itself."""


def render(document: Mapping[str, Any]) -> RenderableType:
    """Renders what :func:`benchmarks.router_load.command.run` measured."""
    parts: list[RenderableType] = [_latency(document), _stages(document), _relay(document), _open(document)]
    neighbours = (
        f"Other processes used {document['neighbour_cores']:.2f} cores during the run; this should be close to 0."
    )
    return Group(*parts, Text(f"{_LEGEND}\n{neighbours}", style="dim"))


def _latency(document: Mapping[str, Any]) -> Table:
    table = _table("requests of one token", "workers", "rate/s", "added p50\nms", "p95", "p99", "through\np50", "p99")
    for name in ("directly\np50", "p99", "router CPU\nms/request", "RSS MiB\nbefore, after"):
        table.add_column(name, justify="right")
    for run in document["latency"]:
        added, through, directly = run["added_ms"], run["through_router_ms"], run["directly_ms"]
        table.add_row(
            run["workers"],
            f"{run['rate']:g}",
            *(f"{added[name]:.2f}" for name in ("p50", "p95", "p99")),
            *(f"{figures[name]:.2f}" for figures in (through, directly) for name in ("p50", "p99")),
            f"{run['router_cpu_ms_per_request']:.2f}",
            ", ".join(f"{value:.0f}" for value in run["rss_mib"]),
        )
    return table


def _stages(document: Mapping[str, Any]) -> Table:
    runs = document["latency"]
    table = _table("the router's stages, ms", "stage")
    for run in runs:
        table.add_column(f"{run['workers']}\np50", justify="right")
        table.add_column("p99", justify="right")
    for stage in runs[0]["stages_ms"] if runs else ():
        figures = [run["stages_ms"][stage][name] for run in runs for name in ("p50", "p99")]
        table.add_row(stage, *(f"{value:.2f}" for value in figures))
    return table


def _relay(document: Mapping[str, Any]) -> Table:
    table = _table("relayed tokens", "tokens per message", "streams", "tokens/s", "tokens/s\nper core", "router\ncores")
    table.add_column("workers'\ncores", justify="right")
    for run in document["relay"]:
        table.add_row(
            str(run["tokens_per_message"]),
            str(run["streams"]),
            f"{run['tokens_per_s']:,.0f}",
            f"{run['tokens_per_router_cpu_s']:,.0f}",
            f"{run['router_cores']:.2f}",
            f"{run['workers_cores']:.2f}",
        )
    return table


def _open(document: Mapping[str, Any]) -> Table:
    run = document["open_streams"]
    table = _table("open streams", "streams", "open at once", "finished", "longest gap ms\np50", "p99", "max")
    for name in ("while opening\nmax", "a step takes\nms", "router\ncores", "RSS MiB\nbefore, open"):
        table.add_column(name, justify="right")
    gaps = run["settled_gap_ms"]
    table.add_row(
        str(run["streams"]),
        str(run["open_at_once"]),
        str(run["finished"]),
        *(f"{gaps[name]:.0f}" for name in ("p50", "p99", "max")),
        f"{run['longest_gap_ms']['max']:.0f}",
        f"{run['step_ms']:g}",
        f"{run['router_cores']:.2f}",
        ", ".join(f"{value:.0f}" for value in run["rss_mib"]),
    )
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    return table
