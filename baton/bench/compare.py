"""``baton bench compare``: compares two reports of ``baton bench serve`` by ratios."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from baton.bench.document import read_serve_document
from baton.bench.latency import PERCENTILES
from baton.bench.tables import LATENCY_NAMES
from baton.core.errors import ConfigError
from baton.core.figure_table import figure_table

_THROUGHPUT = {
    "requests_per_s": "answered /s",
    "output_tokens_per_s": "output tokens/s",
    "input_tokens_per_s": "input tokens/s",
}
_BETTER, _WORSE, _SAME = "better", "worse", "same"
_STYLES = {_BETTER: "green", _WORSE: "red", _SAME: "dim"}
_SETTINGS = ("settings", "target", "environment")
_IGNORED_SETTINGS = ("settings.workload.salt",)
"""Settings that differ by design or do not affect the load."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure in both reports.

    Attributes:
        verdict: whether the second report is ``better``, ``worse`` or, within the tolerance, the ``same``.
    """

    stage: str
    name: str
    first: float
    second: float
    verdict: str

    @property
    def ratio(self) -> float | None:
        """Ratio of the second figure to the first; ``None`` if the first is 0."""
        return self.second / self.first if self.first else None


def run_compare(first: Path, second: Path, tolerance: float) -> tuple[RenderableType, list[Comparison]]:
    """Reads and compares two reports. Returns the table to show, and the comparisons.

    Args:
        tolerance: ratios from ``1 - tolerance`` to ``1 + tolerance`` count as the same.

    Raises:
        ConfigError: a file cannot be read or is not such a report, or the two have no stage in common.
    """
    documents = read_serve_document(first), read_serve_document(second)
    comparisons = compare(*documents, tolerance)
    if not comparisons:
        raise ConfigError(f"{first} and {second} have no stage in common. Measure both with the same load settings.")
    return _render((str(first), str(second)), comparisons, differences(*documents), tolerance), comparisons


def compare(first: Mapping[str, Any], second: Mapping[str, Any], tolerance: float) -> list[Comparison]:
    """Compares every figure of the stages that are in both reports."""
    others = {stage["label"]: stage for stage in second["stages"]}
    return [
        comparison
        for stage in first["stages"]
        if stage["label"] in others
        for comparison in _compare_stages(stage, others[stage["label"]], tolerance)
    ]


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """Different settings, and stages in only one report, which may explain ratios."""
    flat = [
        {key: value for part in _SETTINGS for key, value in _flatten(part, document[part])}
        for document in (first, second)
    ]
    keys = [key for key in dict.fromkeys([*flat[0], *flat[1]]) if key not in _IGNORED_SETTINGS]
    found = [
        f"{key}: {flat[0].get(key)!r} and {flat[1].get(key)!r}" for key in keys if flat[0].get(key) != flat[1].get(key)
    ]
    labels = [[stage["label"] for stage in document["stages"]] for document in (first, second)]
    only_first = [label for label in labels[0] if label not in labels[1]]
    only_second = [label for label in labels[1] if label not in labels[0]]
    found += [f"stage {label}: only in the first report" for label in only_first]
    return found + [f"stage {label}: only in the second report" for label in only_second]


def _compare_stages(first: Mapping[str, Any], second: Mapping[str, Any], tolerance: float) -> Iterator[Comparison]:
    label = str(first["label"])

    def judged(name: str, one: float, other: float, *, less_is_better: bool) -> Comparison:
        return Comparison(label, name, one, other, _verdict(one, other, tolerance, less_is_better=less_is_better))

    for key, name in LATENCY_NAMES.items():
        one, other = first["latencies"][key], second["latencies"][key]
        if one["count"] and other["count"]:
            for rank in PERCENTILES:
                yield judged(f"{name} p{rank} ms", one[f"p{rank}"], other[f"p{rank}"], less_is_better=True)
    for key, name in _THROUGHPUT.items():
        yield judged(name, first["throughput"][key], second["throughput"][key], less_is_better=False)
    if first["goodput"]["requests_per_s"] is not None and second["goodput"]["requests_per_s"] is not None:
        one, other = first["goodput"]["requests_per_s"], second["goodput"]["requests_per_s"]
        yield judged("goodput /s", one, other, less_is_better=False)
    shares = [stage["num_failed"] / max(1, stage["num_measured"]) for stage in (first, second)]
    if any(shares):
        yield judged("failed, share", shares[0], shares[1], less_is_better=True)


def _verdict(first: float, second: float, tolerance: float, *, less_is_better: bool) -> str:
    if abs(second - first) <= tolerance * abs(first):
        return _SAME
    return _BETTER if (second < first) == less_is_better else _WORSE


def _flatten(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flatten(f"{prefix}.{key}", item)
    else:
        yield prefix, value


def _render(
    names: tuple[str, str], comparisons: Sequence[Comparison], differing: Sequence[str], tolerance: float
) -> RenderableType:
    table = figure_table("load", "", "A", "B", "B / A", num_left=2)
    table.add_column("B is")
    shown = ""
    for one in comparisons:
        if shown and one.stage != shown:
            table.add_section()
        ratio = "-" if one.ratio is None else f"{one.ratio:.3f}"
        verdict = Text(one.verdict, style=_STYLES[one.verdict])
        label = one.stage if one.stage != shown else ""
        table.add_row(label, one.name, f"{one.first:.2f}", f"{one.second:.2f}", ratio, verdict)
        shown = one.stage
    parts: list[RenderableType] = [Text(f"A: {names[0]}"), Text(f"B: {names[1]}"), Text(""), table, Text("")]
    parts.append(Text(f"same: within {tolerance:.0%}", style="dim"))
    if differing:
        parts.append(Text("The settings of the two reports differ:", style="bold yellow"))
        parts += [Text(f"• {line}", style="yellow") for line in differing]
    return Group(*parts)
