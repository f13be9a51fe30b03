"""What the command line shows of a cluster, as rich renderables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

_STATE_STYLES = {"ready": "green", "starting": "yellow", "draining": "yellow", "dead": "red"}


def render_status(status: Mapping[str, Any]) -> RenderableType:
    """The answer of GET /admin/status as a few lines and one table."""
    requests = status["requests"]
    heading = Text.assemble(
        (str(status["model"]), "bold"),
        f" at {status['endpoint']}, up for {in_words(float(status['uptime_s']))}\n",
        f"requests: {requests['in_flight']} in flight, {requests['finished']} finished, {requests['failed']} failed",
    )
    table = Table("worker", "state", "in flight", "running", "waiting", "KV blocks", "device", "node", "pid", "up")
    for column in table.columns[2:5]:
        column.justify = "right"
    for name, pool in status["pools"].items():
        num_ready = sum(worker["state"] == "ready" for worker in pool["workers"])
        table.add_section()
        table.add_row(Text(f"{name} pool", style="bold"), f"{num_ready} of {pool['target']}")
        for worker in pool["workers"]:
            table.add_row(*_worker_row(worker))
    return Group(heading, table)


def _worker_row(worker: Mapping[str, Any]) -> list[RenderableType]:
    state = str(worker["state"])
    uptime = worker.get("uptime_s")
    return [
        Text(f"  {worker['id']}"),
        Text(state, style=_STATE_STYLES.get(state, "")),
        _shown(worker.get("in_flight")),
        _shown(worker.get("running")),
        _shown(worker.get("waiting")),
        _blocks(worker),
        _shown(worker.get("device")),
        _shown(worker.get("node")),
        _shown(worker.get("pid")),
        "" if uptime is None else in_words(float(uptime)),
    ]


def _blocks(worker: Mapping[str, Any]) -> str:
    total = worker.get("kv_blocks_total")
    if total is None:
        return ""
    return f"{worker.get('kv_blocks_used', 0)} used, {worker.get('kv_blocks_cached', 0)} cached of {total}"


def _shown(value: object) -> Text:
    return Text("" if value is None else str(value))


def in_words(seconds: float) -> str:
    """A duration for people: ``8 s``, ``3 min 20 s``, ``2 h 5 min``, ``1 d 4 h``."""
    whole = int(seconds)
    for name, size, smaller, smaller_size in (("d", 86_400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= size:
            return f"{whole // size} {name} {whole % size // smaller_size} {smaller}"
    return f"{whole} s"
