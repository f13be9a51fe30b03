"""The state of a cluster as rich renderables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from baton.core.memory_budget import MemoryBudget
from cluster.cli.cli_drafts import drafts_sentences
from cluster.cli.cli_jobs import ENDED
from cluster.cli.cli_slo import queue_sentence, slo_table

_STATE_STYLES = {"ready": "green", "starting": "yellow", "suspected": "yellow", "draining": "yellow", "dead": "red"}
_DEVICE = "device"
"""The only column that wraps, because names of GPUs are long."""
_WIDE = 100
"""The number of terminal columns that fits all columns of the table."""


def render_status(status: Mapping[str, Any], endpoint: str, width: int) -> RenderableType:
    """Renders the answer of GET /admin/status: a few lines, a table of workers and one of SLO classes.

    Args:
        width: columns of the terminal, at least 80. At 100 or more, each worker's age, node and process are shown.
    """
    requests = status["requests"]
    heading = Text.assemble(
        (str(status["model"]), "bold"),
        f" at {endpoint}, up for {in_words(float(status['uptime_s']))}\n",
        f"requests: {requests['in_flight']} in flight, {requests['finished']} finished, "
        f"{requests['cancelled']} cancelled, {requests['rejected']} rejected, {requests['failed']} failed\n",
        _routers(status),
        _jobs(status.get("jobs") or {}),
    )
    columns = _COLUMNS + (_WIDE_COLUMNS if width >= _WIDE else ())
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0) if width >= _WIDE else 0, pad_edge=False)
    for column in columns:
        justify: Literal["right", "left"] = "right" if column.is_number else "left"
        table.add_column(column.heading, justify=justify, no_wrap=column.heading != _DEVICE)
    notes = []
    budgets: dict[str, list[str]] = {}
    for name, pool in status["pools"].items():
        num_ready = sum(worker["state"] == "ready" for worker in pool["workers"])
        table.add_row(Text(name, style="bold"), f"{num_ready} of {pool['target']}")
        if outdated := pool.get("outdated"):
            notes.append(Text(f"{name}: being upgraded; with old settings: {', '.join(outdated)}", style="yellow"))
        for worker in pool["workers"]:
            table.add_row(*(column.show(worker) for column in columns))
            if (worker.get("memory") or {}).get("total"):
                budgets.setdefault(MemoryBudget(**worker["memory"]).describe(), []).append(worker["id"])
            notes += [
                Text(f"{worker['id']}{_waiting(worker)}: {worker[key]}", style="yellow")
                for key in ("reason", "graph_failure")
                if worker.get(key)
            ]
    parts: list[RenderableType] = [heading, table]
    parts += [Text(f"\nGPU memory of {', '.join(ids)}: {budget}") for budget, ids in budgets.items()]
    if drafts := drafts_sentences([worker for pool in status["pools"].values() for worker in pool["workers"]]):
        parts += [Text(""), *drafts]
    if prediction_errors := _predictions(status.get("predictions") or {}):
        parts.append(Text(prediction_errors))
    if status.get("slo"):
        parts += [Text(""), slo_table(status["slo"], is_narrow=width < _WIDE)]
    if waiting := queue_sentence(status.get("admission") or {}):
        parts.append(Text(waiting))
    return Group(*parts, *([Text("")] if notes else []), *notes)


def _waiting(worker: Mapping[str, Any]) -> str:
    """How long a worker has waited for a node; empty for others."""
    return f" has waited for a node for {in_words(float(worker['uptime_s']))}" if worker.get("is_pending") else ""


def _routers(status: Mapping[str, Any]) -> str:
    """The requests in flight of each router in one line; empty for a single router."""
    texts = [
        f"router {each['index']}: {each['requests']['in_flight']} in flight"
        if each["requests"]
        else f"router {each['index']} does not answer, so its requests are not counted"
        for each in status.get("routers", ())
    ]
    return f"{', '.join(texts)}; attainment is that of router {status['router']}\n" if texts else ""


def _jobs(figures: Mapping[str, Mapping[str, int]]) -> str:
    """The progress of the jobs that have not ended, and the number of kept ones, in one line; empty without jobs."""
    states = [(name, f"{count} {name.replace('_', ' ')}") for name, count in figures.get("states", {}).items() if count]
    parts = [", ".join(text for name, text in states if name not in ENDED)]
    lines = figures.get("lines", {})
    if any(lines.values()):
        parts.append(f"{lines['completed']} of {sum(lines.values())} lines answered, {lines['failed']} failed")
    if kept := ", ".join(text for name, text in states if name in ENDED):
        parts.append(f"kept, of earlier clusters too: {kept}")
    return f"jobs: {'; '.join(filter(None, parts))}\n" if states else ""


def _predictions(summary: Mapping[str, Mapping[str, Any]]) -> str:
    """The errors of predictions in one line; empty before the first finished request."""
    texts = [
        f"{kind.upper()} ±{errors['p50']:.0%} (p95 {errors['p95']:.0%})"
        for kind, errors in summary.items()
        if errors["p50"] is not None and errors["p95"] is not None
    ]
    return f"\nprediction errors: {', '.join(texts)}" if texts else ""


@dataclass(frozen=True, slots=True)
class _Column:
    heading: str
    show: Callable[[Mapping[str, Any]], Text]
    is_number: bool = False


def _value(key: str) -> Callable[[Mapping[str, Any]], Text]:
    return lambda worker: _shown(worker.get(key))


def _state(worker: Mapping[str, Any]) -> Text:
    state = str(worker["state"])
    return Text(state, style=_STATE_STYLES.get(state, ""))


def _running(worker: Mapping[str, Any]) -> Text:
    running, most = worker.get("running"), worker.get("max_running")
    return _shown(running if running is None or most is None else f"{running}/{most}")


def _uptime(worker: Mapping[str, Any]) -> Text:
    uptime_s = worker.get("uptime_s")
    return Text("" if uptime_s is None else in_words(float(uptime_s)))


_COLUMNS = (
    _Column("worker", lambda worker: Text(f"  {worker['id']}")),
    _Column("state", _state),
    _Column("in\nflight", _value("in_flight"), is_number=True),
    _Column("running", _running, is_number=True),
    _Column("waiting", _value("waiting"), is_number=True),
    _Column("KV\nblocks", _value("kv_blocks_total"), is_number=True),
    _Column("\nused", _value("kv_blocks_used"), is_number=True),
    _Column("\ncached", _value("kv_blocks_cached"), is_number=True),
    _Column(_DEVICE, _value("device")),
)
_WIDE_COLUMNS = (_Column("up", _uptime), _Column("node", _value("node")), _Column("pid", _value("pid"), is_number=True))


def _shown(value: object) -> Text:
    return Text("" if value is None else str(value))


def in_words(seconds: float) -> str:
    """A human-readable duration: ``8 s``, ``3 min 20 s``, ``2 h 5 min``, ``1 d 4 h``."""
    whole = int(seconds)
    for name, size, smaller, smaller_size in (("d", 86_400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= size:
            return f"{whole // size} {name} {whole % size // smaller_size} {smaller}"
    return f"{whole} s"
