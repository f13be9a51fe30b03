"""``baton check --nodes``: whether the machines of a Ray cluster can work together."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cluster.cli.cli_reporter import Reporter, print_report

if TYPE_CHECKING:
    from cluster.config.config import BatonConfig
    from cluster.controller.node_checks import CheckedNode, NodeReport

_GIB = 2**30
_NONE = "-"
_TITLES = (
    *("node", "pools", "Python", "Ray", "baton", "torch", "driver", "GPUs", "clock\nms"),
    *("/dev/shm\nGiB free", "files", "locked\nMiB", "RDMA", "model"),
)


def check_all_nodes(config: BatonConfig, *, as_json: bool) -> None:
    """Prints what was found. Raises :class:`typer.Exit` if workers could not work like this."""
    from cluster.controller.node_checks import check_nodes
    from cluster.nodes.ray_connection import connect

    with Reporter() as reporter:
        connection = connect(config, reporter)
        try:
            reporter("checking the nodes")
            report = check_nodes(config, thorough=True)
        finally:
            if connection is not None:
                connection.close()
    if as_json:
        sys.stdout.write(json.dumps(_values(report), indent=2) + "\n")
    else:
        print_report(render(report))
    if not report.nodes or any(problem.is_fatal for problem in report.problems):
        raise typer.Exit(1)


def render(report: NodeReport) -> RenderableType:
    """A table of the nodes, one of the connections, and a line for each problem."""
    nodes = _table(*_TITLES)
    for node in report.nodes:
        nodes.add_row(node.name, " ".join(node.pools), *_cells(node))
    parts: list[RenderableType] = [nodes]
    if report.bytes_per_s:
        links = _table("from", "to", "MB/s on one connection")
        for (source, target), rate in report.bytes_per_s.items():
            links.add_row(source, target, f"{rate / 1e6:,.0f}" if rate else "unreachable")
        parts.append(links)
    for problem in report.problems:
        style = "red" if problem.is_fatal else "yellow"
        parts.append(Text("error: " if problem.is_fatal else "warning: ", style=style) + Text(problem.text))
    if not report.nodes:
        parts.append(
            Text("No node has the resources that the pools request; see prefill.resources and decode.resources.")
        )
    elif not report.problems:
        parts.append(Text("No problem was found.", style="green"))
    return Group(*parts)


def _table(*titles: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in titles:
        table.add_column(title)
    return table


def _cells(node: CheckedNode) -> list[str]:
    facts = node.facts
    if facts is None:
        return ["?"]
    locked = facts.max_locked_bytes
    return [
        facts.python,
        facts.ray,
        facts.baton,
        facts.torch,
        facts.driver or _NONE,
        str(len(facts.gpus)) if facts.gpus else _NONE,
        f"{node.offset_s * 1e3:+.0f}",
        f"{facts.shm_free_bytes / _GIB:.1f} of {facts.shm_bytes / _GIB:.1f}",
        "unlimited" if facts.max_files < 0 else str(facts.max_files),
        "unlimited" if locked < 0 else f"{locked / 2**20:.0f}",
        " ".join(facts.rdma) or _NONE,
        {True: "here", False: "missing", None: "?"}[facts.has_model],
    ]


def _values(report: NodeReport) -> dict[str, Any]:
    """The report, JSON-ready."""
    return {
        "nodes": [
            {
                "name": node.name,
                "pools": node.pools,
                "clock_offset_s": node.offset_s,
                "facts": None if node.facts is None else node.facts.to_dict(),
            }
            for node in report.nodes
        ],
        "links": [
            {"from": source, "to": target, "bytes_per_s": rate} for (source, target), rate in report.bytes_per_s.items()
        ],
        "problems": [asdict(problem) for problem in report.problems],
    }
