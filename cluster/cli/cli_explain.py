"""``baton explain``: a request's stages as a waterfall, and the causes of its slow parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from baton.client.router_client import RouterClient
from baton.core.errors import NotFoundError
from baton.explain.timelines import Order
from cluster.cli.cli_common import duration
from cluster.cli.cli_routing import render_routing
from cluster.cli.cli_slo import slo_sentence
from cluster.config.key_changes import how_to_change

_MAX_LISTED = 1000
"""The most that the router lists, so that running requests do not hide a finished one."""
_MIN_BAR = 8
# Widths of the table's columns; a space follows each column.
_MAX_NAME, _DURATION, _SHARE, _COUNT = 20, 7, 4, 5
_WORK = frozenset({"tokenize", "prefill", "decode", "detokenize", "parse"})
_LOST = frozenset({"retry", "recompute"})


async def fetch_timeline(client: RouterClient, request_id: str | None, which: Order) -> dict[str, Any]:
    """The timeline of a request, by default the newest or the slowest one that has finished.

    Raises:
        NotFoundError: there is no such request, or the router has kept none.
    """
    if request_id is None:
        listed = await client.requests(which, _MAX_LISTED)
        if not listed:
            raise NotFoundError(
                "The router has no timelines: it has served no request yet, or router.timelines_kept is 0."
            )
        finished = (str(entry["request_id"]) for entry in listed if entry["outcome"] is not None)
        request_id = next(finished, None)
        if request_id is None:
            raise NotFoundError(
                f"No request has finished: all {len(listed)} that the router lists are still running. Wait for one, "
                f"or see what is known of the newest so far: baton explain {listed[0]['request_id']}"
            )
    return await client.timeline(request_id)


def render_timeline(timeline: Mapping[str, Any], width: int) -> RenderableType:
    """Renders the answer of ``GET /v1/requests/{id}/timeline`` in ``width`` columns."""
    sequences: Sequence[Mapping[str, Any]] = timeline.get("sequences") or [timeline]
    parts: list[RenderableType] = []
    for sequence in sequences:
        if parts:
            parts.append(Text(""))
        parts.extend(_render_sequence(sequence, width))
    return Group(*parts)


def _render_sequence(timeline: Mapping[str, Any], width: int) -> list[RenderableType]:
    parts: list[RenderableType] = [_heading(timeline), Text(""), _waterfall(timeline, width)]
    parallel = _parallel_spans(timeline, width)
    if parallel is not None:
        parts += [Text("\nin parallel with these stages", style="dim"), parallel]
    for key in ("time_to_first_token", "slowest_gap"):
        if timeline.get(key):
            parts += [Text(""), *_verdict(timeline[key])]
    parts += render_routing(timeline)
    return parts


def _heading(timeline: Mapping[str, Any]) -> Text:
    attributes = timeline.get("attributes", {})
    tokens = f"{attributes.get('prompt_tokens', '?')} prompt tokens"
    if attributes.get("cached_tokens"):
        tokens += f" ({attributes['cached_tokens']} cached)"
    outcome = attributes.get("outcome", "still running")
    words = [
        f"{duration(timeline.get('total_ms', 0.0))} in total",
        tokens,
        f"{attributes.get('output_tokens', '?')} output",
    ]
    if attributes.get("drafted_tokens"):
        words.append(_drafts(attributes, timeline.get("drafts") or {}))
    first = "prefill_worker" if "prefill_worker" in attributes else "local_worker"
    workers = list(dict.fromkeys(str(attributes[key]) for key in (first, "decode_worker") if key in attributes))
    heading = Text.assemble((str(timeline["request_id"]), "bold"), f": {outcome}\n", ", ".join(words))
    if "error_message" in attributes:
        heading.append(f"\n{attributes['error_message']}")
    if workers:
        heading.append("\n" + " → ".join(workers))
    slo_result = slo_sentence(attributes)
    if slo_result is not None:
        heading.append(f"\n{slo_result}")
    return heading


def _drafts(attributes: Mapping[str, Any], by_method: Mapping[str, Mapping[str, int]]) -> str:
    """The share of accepted drafts. ``by_method`` is empty for older routers and workers."""
    text = f"{attributes.get('accepted_tokens', 0)} of {attributes['drafted_tokens']} drafts accepted"
    if len(by_method) == 1:
        return f"{text} (by {next(iter(by_method))})"
    shares = [
        f"{method} {counts['accepted_tokens']} of {counts['drafted_tokens']}"
        for method, counts in sorted(by_method.items())
    ]
    return f"{text} ({', '.join(shares)})" if shares else text


def _waterfall(timeline: Mapping[str, Any], width: int) -> Table:
    blamed = {timeline[key]["stage"] for key in ("time_to_first_token", "slowest_gap") if timeline.get(key)}
    total_ms = max(float(timeline.get("total_ms", 0.0)), 1e-6)
    table = _table()
    for stage in timeline.get("stages", ()):
        name, start_ms, duration_ms = stage["name"], float(stage["start_ms"]), float(stage["duration_ms"])
        style = "red" if name in _LOST else "green" if name in _WORK else "yellow"
        table.add_row(
            Text(name.replace("_", " "), style="bold" if name in blamed else ""),
            duration(duration_ms),
            f"{duration_ms / total_ms:.0%}",
            f"×{stage['count']}" if stage.get("count", 1) > 1 else "",
            Text(_bar(start_ms, duration_ms, total_ms, _bar_width(width)), style=style),
        )
    return table


def _parallel_spans(timeline: Mapping[str, Any], width: int) -> Table | None:
    """The spans that overlap with the stages: waiting for KV room, and the KV transfer."""
    total_ms = max(float(timeline.get("total_ms", 0.0)), 1e-6)
    table = _table()
    for span in timeline.get("spans", ()):
        if span["name"] in ("reserve", "transfer"):
            bar = _bar(float(span["start_ms"]), float(span["duration_ms"]), total_ms, _bar_width(width))
            name = "KV reservation" if span["name"] == "reserve" else "KV transfer"
            table.add_row(name, duration(float(span["duration_ms"])), "", "", Text(bar, style="cyan"))
    return table if table.row_count else None


def _table() -> Table:
    table = Table.grid(padding=(0, 1, 0, 0))
    # A narrow terminal crops the bars, never the names and numbers.
    for width in (_MAX_NAME, _DURATION, _SHARE):
        table.add_column(justify="left" if width == _MAX_NAME else "right", no_wrap=True, min_width=width)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True, overflow="crop")
    return table


def _verdict(blame: Mapping[str, Any]) -> list[RenderableType]:
    lines = [f"→ {blame['hint']}", how_to_change(str(blame["hint"]))]
    return [Text(str(blame["sentence"])), *(Text(line, style="dim") for line in lines if line)]


def _bar_width(width: int) -> int:
    columns = (_MAX_NAME, _DURATION, _SHARE, _COUNT)
    return max(_MIN_BAR, width - sum(columns) - len(columns))


def _bar(start_ms: float, duration_ms: float, total_ms: float, width: int) -> str:
    """A bar at the position of its start, at least one character long."""
    start = min(width - 1, int(start_ms / total_ms * width))
    length = max(1, min(width - start, round(duration_ms / total_ms * width)))
    return " " * start + "━" * length
