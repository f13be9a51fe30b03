"""The routing part of ``baton explain``: the scored routes, their predictions, and the actual times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from cluster.cli.cli_common import duration


def render_routing(timeline: Mapping[str, Any]) -> list[RenderableType]:
    """Renders a timeline's routing record; empty when there is none."""
    record = timeline.get("routing") or {}
    candidates: Sequence[Mapping[str, Any]] = record.get("candidates") or ()
    if not candidates:
        return []
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True, overflow="ellipsis")
    for _ in range(3):
        table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True, overflow="ellipsis")
    table.add_row(*(Text(title, style="dim") for title in ("", "TTFT", "TPOT", "score", "")))
    for candidate in candidates:
        table.add_row(
            Text(_route(candidate), style="bold" if candidate.get("chosen") else ""),
            _known(candidate.get("ttft_ms")),
            _known(candidate.get("tpot_ms")),
            f"{candidate.get('score', 0.0):.2f}",
            Text(_remark(candidate), style="dim"),
        )
    actual = record.get("actual")
    if actual:
        table.add_row(Text("actual", style="dim"), _known(actual.get("ttft_ms")), _known(actual.get("tpot_ms")), "", "")
    weighed, count = record.get("num_weighed", len(candidates)), record.get("num_routes", len(candidates))
    shown = f"{weighed} of {count} routes scored" if weighed != count else f"{count} routes scored"
    return [Text(f"\nrouting: {shown}, with predicted times", style="dim"), table]


def _route(candidate: Mapping[str, Any]) -> str:
    if candidate.get("prefill") is None:
        return f"{candidate.get('decode')} alone"
    return f"{candidate['prefill']} → {candidate.get('decode')}"


def _remark(candidate: Mapping[str, Any]) -> str:
    words = []
    if candidate.get("chosen"):
        words.append("chosen")
    if candidate.get("lost_on"):
        words.append(f"lost on {str(candidate['lost_on']).replace('_', ' ')}")
    if candidate.get("cached_tokens"):
        words.append(f"{candidate['cached_tokens']} cached")
    return ", ".join(words)


def _known(milliseconds: float | None) -> str:
    return "" if milliseconds is None else duration(milliseconds)
