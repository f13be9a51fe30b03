"""Compares a simulation with the real run that it predicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Table

from baton.bench.document import read_serve_document
from baton.core.errors import ConfigError
from baton.core.outcomes import FINISHED
from cluster.simulation.report import ReplayedRequest, percentiles
from cluster.simulation.workload import MeasuredRequest


def read_stage(file: Path, label: str | None = None) -> dict[str, Any]:
    """Reads a stage of a report of ``baton bench serve --json``: the one with ``label``, or the only one.

    Raises:
        ConfigError: the file is not such a report, or has no such stage.
    """
    document = read_serve_document(file)
    stages = {str(stage["label"]): stage for stage in document["stages"]}
    if label is None and len(stages) == 1:
        label = next(iter(stages))
    if label not in stages:
        raise ConfigError(f"{file} has the stages {', '.join(stages)}; name one of them with --stage.")
    return {**stages[label], "slo": document["settings"].get("slo")}


def measured_requests(stage: Mapping[str, Any]) -> tuple[list[MeasuredRequest], int]:
    """The requests of a real run, and the number of requests left out because their length is unknown.

    Failed requests loaded the servers too, so they count with the lengths that were requested.

    Raises:
        ConfigError: the report has no samples of single requests.
    """
    samples = stage.get("samples", ())
    found = [request for request in map(_measured, samples) if request is not None]
    if not found:
        raise ConfigError(
            "The report has no samples of single requests. Measure with `baton bench serve --samples --json FILE`, or "
            "name the trace that was sent with --trace."
        )
    found.sort(key=lambda request: request.at_s)
    first_s = found[0].at_s
    return [replace(request, at_s=request.at_s - first_s) for request in found], len(samples) - len(found)


def _measured(sample: Mapping[str, Any]) -> MeasuredRequest | None:
    has_failed = sample.get("error") is not None
    input_tokens = sample["input_tokens"] or sample.get("wanted_input")
    output_tokens = sample["wanted_output"] if has_failed else sample["output_tokens"]
    if not (input_tokens and output_tokens):
        return None
    return MeasuredRequest(
        sample["intended_s"], input_tokens, output_tokens, sample["cached_tokens"] or 0, is_warmup=sample["is_warmup"]
    )


def compare(stage: Mapping[str, Any], requests: Sequence[ReplayedRequest], seconds: float) -> dict[str, Any]:
    """Measured and simulated figures, and the error of the latter relative to the former; JSON-ready."""
    finished = [request for request in requests if request.outcome in FINISHED]
    simulated = {
        "ttft_ms": percentiles([request.ttft_ms for request in finished]) or {},
        "tpot_ms": percentiles([request.tpot_ms for request in finished]) or {},
    }
    figures = {
        f"{name} {quantile}": _pair(stage["latencies"][name].get(quantile), values.get(quantile))
        for name, values in simulated.items()
        for quantile in ("p50", "p95", "p99", "mean")
    }
    if stage.get("slo"):
        met = sum(_keeps(request, stage["slo"]) for request in finished)
        figures["attainment"] = _pair(stage["goodput"]["attainment"], met / len(requests) if requests else None)
        figures["goodput 1/s"] = _pair(stage["goodput"]["requests_per_s"], met / seconds if seconds > 0 else None)
    return figures


def comparison_table(figures: Mapping[str, Mapping[str, float | None]]) -> Table:
    table = Table(title="simulated against measured")
    for column in ("figure", "measured", "simulated", "error"):
        table.add_column(column, justify="left" if column == "figure" else "right")
    for name, row in figures.items():
        error = "-" if row["error"] is None else f"{100 * row['error']:+.1f} %"
        table.add_row(name, _shown(row["measured"]), _shown(row["simulated"]), error)
    return table


def _keeps(request: ReplayedRequest, slo: Mapping[str, float | None]) -> bool:
    measured = {"ttft_ms": request.ttft_ms, "tpot_ms": request.tpot_ms, "e2e_ms": request.heard_ms}
    return all(
        limit is None or value is None or value <= limit for name, value in measured.items() for limit in (slo[name],)
    )


def _pair(measured: float | None, simulated: float | None) -> dict[str, float | None]:
    error = (simulated - measured) / measured if measured and simulated is not None else None
    return {"measured": measured, "simulated": simulated, "error": None if error is None else round(error, 4)}


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
