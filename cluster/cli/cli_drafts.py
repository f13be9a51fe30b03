"""Speculation in the terminal: each worker's state, advice on drafts, and the formula's curve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from baton.core.draft_payoff import Acceptance, advise_length, payoff_curve
from baton.core.errors import ConfigError
from baton.core.figure_table import figure_table


def drafts_sentences(workers: Sequence[Mapping[str, Any]]) -> list[Text]:
    """A line for each worker that speculates: its default method, and α, c and the length of each method."""
    lines = []
    for worker in workers:
        report = worker.get("speculation")
        if report is None:
            continue
        methods = [_state(entry) for entry in report["methods"] if entry["num_drafts"]]
        auto = f" (auto drafts {report['tokens_per_sequence']:.1f} a step)" if report["method"] == "auto" else ""
        lines.append(Text(f"drafts of {worker['id']}: {'; '.join(methods) or 'none yet'}{auto}"))
    return lines


def render_drafts(entries: Sequence[Mapping[str, Any]]) -> RenderableType:
    """The part ``speculation`` of the answer of GET /admin/advise: figures, best lengths and advice by worker."""
    if not entries:
        return Text("Drafts: no worker has drafted yet.")
    table = figure_table("worker", "drafts by", "α", "c", "k now", "k by formula", "k measured", num_left=2)
    texts: dict[str, None] = {}
    for entry in entries:
        method = _named(entry)
        table.add_row(
            entry["worker"],
            method,
            _shown(entry["alpha"], ".2f"),
            _shown(entry["cost"], ".2f"),
            _shown(entry["length"], ".1f"),
            _best(entry, "best_by_formula", "speedup_by_formula"),
            _best(entry, "best_measured", "speedup_measured"),
        )
        texts[f"{entry['worker']}, {method}: {entry['advice']}"] = None
        texts |= {f"{entry['worker']}: {text}": None for text in (*entry["warnings"], *entry["formula_errors"])}
    return Group(table, Text(""), *(Text(f"• {text}") for text in texts))


def assumed_drafts(alpha: str, cost: float) -> dict[str, Any]:
    """The curve and the advice for given figures; JSON-ready.

    Args:
        alpha: one acceptance, or several by position, separated by commas.

    Raises:
        ConfigError: a figure is not a number, or impossible.
    """
    try:
        by_position = tuple(float(part) for part in alpha.split(","))
        curve = payoff_curve(Acceptance(by_position), cost)
    except ValueError as error:
        raise ConfigError(
            f"--alpha {alpha} --draft-cost {cost:g}: {error}. Example: --alpha 0.7 --draft-cost 0.15."
        ) from error
    mean = sum(by_position) / len(by_position)
    return {**curve.to_dict(), "advice": advise_length(mean, curve).text}


def render_assumed(answer: Mapping[str, Any]) -> RenderableType:
    """Renders :func:`assumed_drafts`."""
    table = figure_table("k", "tokens of a round", "speed-up", num_left=0)
    for length, (tokens, gain) in enumerate(zip(answer["expected_tokens"], answer["speedups"], strict=True), start=1):
        mark = " ← best" if length == answer["best"] else " ← cliff" if length == answer["cliff"] else ""
        table.add_row(str(length), f"{tokens:.2f}", f"{gain:.2f}{mark:<8}")
    return Group(table, Text(""), Text(f"• {answer['advice']}"))


def _state(entry: Mapping[str, Any]) -> str:
    return (
        f"{_named(entry)} α {_shown(entry['alpha'], '.2f')}, c {_shown(entry['cost'], '.2f')}, k {entry['length']:.1f}"
    )


def _named(entry: Mapping[str, Any]) -> str:
    return f"{entry['method']} (shadow)" if entry["mode"] == "shadow" else str(entry["method"])


def _best(entry: Mapping[str, Any], length: str, gain: str) -> str:
    if entry[length] is None:
        return "-"
    return f"{entry[length]} ({entry[gain]:.2f})" if entry[length] else "0"


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
