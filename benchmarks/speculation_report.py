"""The speculation benchmark's results, as JSON and as tables."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from baton.core.figure_table import figure_table
from benchmarks.speculation_rounds import NO_METHOD, RoundTally
from benchmarks.speculation_runs import CellResult
from decode_worker.speculation.controller import AUTO
from decode_worker.speculation.verification import MATCH

FORMAT = "baton-bench-speculation"
_FORMAT_VERSION = 1
_SHOWN_POSITIONS = 4
_DIGITS = 4
_HEADINGS = (
    "method",
    "T",
    "batch",
    "tau",
    "% at position",
    "drafted",
    "verified",
    "accepted",
    "draft\nms",
    "verify\nms",
    "TPOT\noff",
    "TPOT\non",
    "speed-up",
    "differ",
)
_LEGEND = """\
tau: tokens per sequence and step, 1 without speculation. % at position: share of the drafts of at least that length
that were accepted up to the first, second, ... token. drafted, verified, accepted: tokens. draft and verify: median
milliseconds of a step. TPOT: median milliseconds per token, without prefill. speed-up: geometric mean over the
requests of a pair of runs; median and range over the pairs. differ: requests whose tokens differ from those without
speculation."""


@dataclass(slots=True)
class SpeculationReport:
    """The results of the benchmark.

    Attributes:
        environment: machine, versions and model, including ``dtype`` and ``acceptance``.
        settings: the benchmark's settings.
        left_out: methods that cannot run here, with the reason.
    """

    environment: Mapping[str, Any]
    settings: Mapping[str, Any]
    left_out: Mapping[str, str]
    results: list[CellResult] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-ready values. Times are in milliseconds, acceptances in [0, 1]."""
        return {
            "format": FORMAT,
            "version": _FORMAT_VERSION,
            "environment": dict(self.environment),
            "settings": dict(self.settings),
            "left_out": dict(self.left_out),
            "equality": self.equality(),
            "cells": [_cell_dict(result) for result in self.results],
        }

    def write(self, file: Path) -> None:
        """Replaces an older report atomically."""
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(".part")
        unfinished.write_text(json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        os.replace(unfinished, file)

    def equality(self) -> dict[str, Any]:
        """Whether requests got the tokens of plain decoding, and whether they had to."""
        return {
            "num_requests": sum(result.num_requests for result in self.results),
            "num_different": sum(result.num_different for result in self.results),
            "expected_equal": self._expects_equal,
        }

    def render(self) -> RenderableType:
        """A table for each workload, followed by notes on all of them."""
        parts: list[RenderableType] = []
        for workload in dict.fromkeys(result.cell.workload for result in self.results):
            parts += [Text(workload, style="bold"), self._table(workload), *self._auto_notes(workload), Text("")]
        parts += [Text(_LEGEND, style="dim"), Text("")]
        notes = [self._equality_note(), *self._failure_notes()]
        notes += [Text(f"left out: {name}: {reason}", style="yellow") for name, reason in self.left_out.items()]
        return Group(*parts, *notes)

    @property
    def _expects_equal(self) -> bool:
        return bool(self.environment["dtype"] == "float32" and self.environment["acceptance"] == MATCH)

    def _table(self, workload: str) -> Table:
        table = figure_table(*_HEADINGS)
        for result in self.results:
            if result.cell.workload == workload:
                table.add_row(*_row(result), style="dim" if result.num_failures else None)
        return table

    def _auto_notes(self, workload: str) -> list[Text]:
        """The shares of the methods whose drafts were verified with ``auto``."""
        return [
            Text(f"auto at T {result.cell.temperature:g}, batch {result.cell.batch}: {_shares_in_words(result.tally)}")
            for result in self.results
            if result.cell.workload == workload and result.cell.method == AUTO
        ]

    def _equality_note(self) -> Text:
        counts, dtype = self.equality(), self.environment["dtype"]
        different, total = counts["num_different"], counts["num_requests"]
        if not different:
            return Text(f"{dtype}: all {total} requests got the same tokens as without speculation.", style="green")
        if self._expects_equal:
            return Text(
                f"{dtype}: {different} of {total} requests got DIFFERENT tokens than without speculation, "
                "which is an error unless two tokens were within rounding of each other.",
                style="bold red",
            )
        acceptance = self.environment["acceptance"]
        reason = (
            f"in {dtype}, a forward of several tokens rounds differently than a forward of one token"
            if acceptance == MATCH
            else f"with speculation.acceptance {acceptance}, sampled tokens differ from those of plain decoding"
        )
        return Text(f"{different} of {total} requests got different tokens than without speculation: {reason}.")

    def _failure_notes(self) -> list[Text]:
        return [
            Text(f"{result.cell}: a method failed (see the log), so these figures are unreliable.", style="bold red")
            for result in self.results
            if result.num_failures
        ]


def _row(result: CellResult) -> list[str | Text]:
    cell, tally = result.cell, result.tally
    shown = [f"{100 * rate:.0f}" for rate in tally.acceptance[:_SHOWN_POSITIONS]]
    more = ["…"] if len(tally.acceptance) > _SHOWN_POSITIONS else []
    speedups = result.speedups
    return [
        cell.method,
        f"{cell.temperature:g}",
        str(cell.batch),
        f"{tally.tau:.2f}",
        " ".join(shown + more) or "-",
        str(tally.num_drafted),
        str(tally.num_verified),
        str(tally.num_accepted),
        f"{_median(tally.draft_ms):.1f}",
        f"{_median(tally.verify_ms):.1f}",
        f"{result.plain_tpot_ms:.1f}",
        f"{result.tpot_ms:.1f}",
        Text(f"{result.speedup:.2f} {min(speedups):.2f}-{max(speedups):.2f}", style=_style(result.speedup)),
        f"{result.num_different} of {result.num_requests}",
    ]


def _style(speedup: float) -> str:
    return "green" if speedup >= 1.03 else "red" if speedup < 0.97 else ""


def _cell_dict(result: CellResult) -> dict[str, Any]:
    cell, tally = result.cell, result.tally
    values = {
        "method": cell.method,
        "workload": cell.workload,
        "temperature": cell.temperature,
        "batch": cell.batch,
        "tau": tally.tau,
        "acceptance_by_position": tally.acceptance,
        "conditional_acceptance_by_position": tally.conditional_acceptance,
        "rounds_by_position": {"offered": tally.offered, "reached": tally.reached, "accepted": tally.accepted},
        "num_rounds": tally.num_rounds,
        "num_tokens": tally.num_tokens,
        "num_drafted": tally.num_drafted,
        "num_verified": tally.num_verified,
        "num_accepted": tally.num_accepted,
        "share_of_rounds_by_method": _shares(tally),
        "draft_ms_per_step": {"median": _median(tally.draft_ms), "mean": _mean(tally.draft_ms)},
        "verify_ms_per_step": {"median": _median(tally.verify_ms), "mean": _mean(tally.verify_ms)},
        "tpot_ms": {"off": result.plain_tpot_ms, "on": result.tpot_ms},
        "decode_ms_per_token": {"off": result.plain_ms_per_token, "on": result.ms_per_token},
        "speedup": result.speedup,
        "speedup_of_each_pair": result.speedups,
        "num_requests": result.num_requests,
        "num_different": result.num_different,
        "num_failures": result.num_failures,
    }
    rounded: dict[str, Any] = _rounded(values)
    return rounded


def _shares(tally: RoundTally) -> dict[str, float]:
    """The shares of the rounds by method, the largest first."""
    return {name: count / tally.num_rounds for name, count in tally.by_method.most_common()}


def _shares_in_words(tally: RoundTally) -> str:
    return ", ".join(
        f"{'no draft' if name == NO_METHOD else name} in {100 * share:.0f}% of rounds"
        for name, share in _shares(tally).items()
    )


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, _DIGITS)
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return value
