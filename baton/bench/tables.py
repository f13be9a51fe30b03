"""Renders a run as tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from baton.bench.checklist import Check, Verdict, checklist
from baton.bench.latency import Summary
from baton.bench.sample import Slo
from baton.bench.stage_result import StageResult
from baton.core.figure_table import figure_table

LATENCY_NAMES: Mapping[str, str] = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "itl_ms": "ITL", "e2e_ms": "E2E"}
_VERDICT_STYLES = {Verdict.PASS: "green", Verdict.NOTE: "dim", Verdict.FAIL: "bold yellow"}
_LEGEND = """\
TTFT: time to first token. TPOT: (last - first token) / (tokens - 1), per request. ITL: time between two
chunks of a stream; a chunk may contain several tokens. E2E: time to the end of the stream. Latencies cover answered
requests only."""
_OPEN_LEGEND = """\
Open loop: TTFT and E2E start at the time when a request was due, so they include the wait for a slow server. The rows
"from send" start at the time when it was sent, as in a closed loop."""


def render_run(
    stages: Sequence[StageResult], slo: Slo | None, target: Mapping[str, Any], notes: Sequence[str]
) -> RenderableType:
    """Throughput and latencies of all stages, followed by notes."""
    heading = Text(f"{target['model']} at {target['url']}", style="bold")
    workload = target["workload"]
    lines = [f"{name.replace('_', ' ')}: {value}" for name, value in workload.items() if value not in ("", None)]
    parts: list[RenderableType] = [heading, Text("; ".join(lines), style="dim"), Text("")]
    parts += [_throughput(stages, slo), Text(""), _latencies(stages), Text("")]
    parts.append(Text(_LEGEND, style="dim"))
    if any(stage.run.stage.is_open for stage in stages):
        parts.append(Text(_OPEN_LEGEND, style="dim"))
    parts += [Text(""), render_checklist(checklist(stages))]
    parts += [Text(f"• {note}", style="yellow") for note in notes]
    for stage in stages:
        parts += [Text(f"• {stage.label}: {note}", style="yellow") for note in stage.notes]
        for kind, count in stage.failures.items():
            example = stage.failure_messages.get(kind, "")
            parts.append(Text(f"• {stage.label}: {count} failed: {kind} {example}".rstrip(), style="red"))
    return Group(*parts, *_slowest_first_token(stages))


def _slowest_first_token(stages: Sequence[StageResult]) -> list[RenderableType]:
    """A line that leads to the timeline of the request; empty if the server gave its requests no ids."""
    found = [
        (ttft_s, sample.request_id)
        for stage in stages
        for sample in stage.answered
        if sample.request_id and (ttft_s := sample.ttft_s(from_send=True)) is not None
    ]
    if not found:
        return []
    ttft_s, request_id = max(found)
    return [Text(f"slowest first token: {ttft_s:.2f} s (baton explain {request_id})")]


def render_checklist(checks: Sequence[Check]) -> Table:
    """The checklist of a load test, with a reason for each verdict."""
    table = figure_table("check", "", num_left=2)
    table.add_column("reason")
    for check in checks:
        table.add_row(check.name, Text(check.verdict, style=_VERDICT_STYLES[check.verdict]), Text(check.reason))
    return table


def _throughput(stages: Sequence[StageResult], slo: Slo | None) -> Table:
    table = figure_table(
        "load", "requests", "failed", "offered\n/s", "answered\n/s", "output\ntokens/s", "input\ntokens/s"
    )
    table.add_column("tokens in,\nout (mean)", justify="right")
    table.add_column("cached", justify="right")
    if slo is not None:
        table.add_column(f"goodput/s\n{slo.describe()}", justify="right")
    for stage in stages:
        row: list[str | Text] = [
            stage.label,
            str(stage.num_measured),
            Text(str(stage.num_failed), style="bold red" if stage.num_failed else ""),
            f"{stage.offered_per_s:.2f}" if stage.run.stage.is_open else "-",
            f"{stage.requests_per_s:.2f}",
            f"{stage.output_tokens_per_s:.1f}",
            f"{stage.input_tokens_per_s:.1f}",
            f"{stage.mean_input:.0f}, {stage.mean_output:.0f}",
            f"{stage.cached_share:.0%}",
        ]
        if stage.goodput_per_s is not None and stage.attainment is not None:
            row.append(f"{stage.goodput_per_s:.2f} ({stage.attainment:.1%})")
        table.add_row(*row)
    return table


def _latencies(stages: Sequence[StageResult]) -> Table:
    table = figure_table("load", "ms", "mean", "min", "p50", "p95", "p99", "max")
    table.columns[1].justify = "left"
    for stage in stages:
        label = stage.label
        for key, name in LATENCY_NAMES.items():
            table.add_row(label, name, *_cells(stage.latencies[key]))
            label = ""
        if stage.run.stage.is_open:
            for key, summary in stage.latencies_from_send.items():
                table.add_row("", f"{LATENCY_NAMES[key]} from send", *_cells(summary), style="dim")
        table.add_section()
    return table


def _cells(summary: Summary) -> list[str]:
    if not summary.count:
        return ["-"] * 6
    values = (summary.mean, summary.min, summary.p50, summary.p95, summary.p99, summary.max)
    return [f"{value:.1f}" for value in values]
