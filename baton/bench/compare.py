"""``baton bench compare``: compares two reports of ``baton bench serve`` by ratios."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from baton.bench.document import read_serve_document
from baton.bench.goodput_search import share_interval
from baton.bench.latency import PERCENTILES
from baton.bench.tables import LATENCY_NAMES
from baton.core.errors import ConfigError
from baton.core.figure_table import figure_table

_THROUGHPUT = {
    "requests_per_s": "answered /s",
    "output_tokens_per_s": "output tokens/s",
    "input_tokens_per_s": "input tokens/s",
}
_FAILED = "failed, share"
_MORE_IS_BETTER = frozenset({*_THROUGHPUT.values(), "goodput /s"})
_BETTER, _WORSE, _SAME, _UNCLEAR = "better", "worse", "same", "unclear"
_STYLES = {_BETTER: "green", _WORSE: "red", _SAME: "dim", _UNCLEAR: "dim"}
_SETTINGS = ("settings", "target", "environment")
_IGNORED_SETTINGS = ("settings.workload.salt",)
"""Settings that differ by design or do not affect the load."""


@dataclass(frozen=True, slots=True)
class _Figure:
    """A figure of one report.

    Attributes:
        interval: its 95 % confidence interval; ``None`` for too few requests.
    """

    value: float
    interval: tuple[float, float] | None

    def overlaps(self, other: _Figure) -> bool:
        if self.interval is None or other.interval is None:
            return True
        return self.interval[0] <= other.interval[1] and other.interval[0] <= self.interval[1]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure in both reports.

    Attributes:
        verdict: whether the second report is ``better``, ``worse``, the ``same`` within the tolerance, or, if the
            confidence intervals of the figures overlap, ``unclear``.
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
        tolerance: ratios from ``1 - tolerance`` to ``1 + tolerance`` count as the same. Other ones count as better or
            worse only if the confidence intervals of the two figures do not overlap.

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
    ours, theirs = _figures(first), _figures(second)
    for name in ours:
        one, other = ours[name], theirs.get(name)
        if other is not None and not (name == _FAILED and one.value == other.value == 0):
            yield Comparison(label, name, one.value, other.value, _verdict(name, one, other, tolerance))


def _figures(stage: Mapping[str, Any]) -> dict[str, _Figure]:
    """The figures of a stage by name, in the order in which they are shown."""
    figures = {}
    for key, name in LATENCY_NAMES.items():
        summary = stage["latencies"][key]
        if summary["count"]:
            for rank in PERCENTILES:
                figures[f"{name} p{rank} ms"] = _Figure(summary[f"p{rank}"], summary["intervals"].get(f"p{rank}"))
    for key, name in _THROUGHPUT.items():
        figures[name] = _rate(stage, stage["throughput"][key])
    count = stage["num_measured"]
    if (attainment := stage["goodput"]["attainment"]) is not None:
        low, high = share_interval(round(attainment * count), count)
        answered = _rate(stage, stage["throughput"]["requests_per_s"]).interval
        interval = None if answered is None else (low * answered[0], high * answered[1])
        figures["goodput /s"] = _Figure(stage["goodput"]["requests_per_s"], interval)
    if count:
        figures[_FAILED] = _Figure(stage["num_failed"] / count, share_interval(stage["num_failed"], count))
    return figures


def _rate(stage: Mapping[str, Any], value: float) -> _Figure:
    """A rate, which is as uncertain as the mean time of an answer."""
    times = stage["latencies"]["e2e_ms"]
    if "mean" not in times["intervals"]:
        return _Figure(value, None)
    low, high = (bound / times["mean"] for bound in times["intervals"]["mean"])
    return _Figure(value, (low * value, high * value))


def _verdict(name: str, first: _Figure, second: _Figure, tolerance: float) -> str:
    if abs(second.value - first.value) <= tolerance * abs(first.value):
        return _SAME
    if first.overlaps(second):
        return _UNCLEAR
    return _WORSE if (second.value < first.value) == (name in _MORE_IS_BETTER) else _BETTER


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
    legend = f"same: within {tolerance:.0%}. unclear: the 95 % confidence intervals overlap; more requests narrow them."
    parts.append(Text(legend, style="dim"))
    if differing:
        parts.append(Text("The settings of the two reports differ:", style="bold yellow"))
        parts += [Text(f"• {line}", style="yellow") for line in differing]
    return Group(*parts)
