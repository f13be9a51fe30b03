"""Tables of a device run, and the standard output, which may close while the run continues."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.device_run.stacks import telling_lines

_NOT_SHOWN = frozenset({"run", "part", "device", "at", "hidden", "traceback", "log", "ok", "name", "error"})
_MAX_PASSED_SHOWN = 8
"""Number of right rows from which these are counted instead of shown."""
_MAX_COLUMNS = 9
_MAX_ERROR_CHARS, _MAX_CELL_CHARS = 400, 90


def show_part(console: Console, title: str, status: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Shows a part's rows and how it ended. Rows with the same figures share a table."""
    ended = next((row for row in rows if "status" in row), {})
    console.rule(f"{title}: {status}, {ended.get('wall_s', 0):.1f} s", characters="-", align="left")
    results = [row for row in rows if "status" not in row and not row.get("hidden")]
    right = [row for row in results if row.get("ok") is True]
    if len(right) > _MAX_PASSED_SHOWN:
        console.print(f"{len(right)} of {sum('ok' in row for row in results)} checks passed", highlight=False)
        results = [row for row in results if row.get("ok") is not True]
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in results:
        if "error" not in row:
            groups.setdefault(_figures(row), []).append(row)
    for keys, group in groups.items():
        _show_group(console, keys, group)
    errors = [row for row in results if "error" in row]
    for row in errors:
        console.print(Text(f"{row.get('name')}: {_shortened(row['error'], _MAX_ERROR_CHARS)}"))
    for line in () if errors and status == "failed" else telling_lines(ended.get("log", ())):
        console.print(Text(f"  | {line}"), no_wrap=True, overflow="ellipsis")


def show_machine(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """Shows the machine in a few lines."""
    for row in rows:
        if "status" not in row and "error" not in row:
            figures = ", ".join(f"{key} {_text(row[key])}" for key in _figures(row))
            console.print(Text(f"{row.get('name')}: {figures}"))


def show_summary(console: Console, statuses: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Shows a line for each part."""
    table = _table("part", "status", "s", "results", "wrong", "not run", "targets missed")
    for name, status in statuses.items():
        own = [row for row in rows if row.get("part") == name]
        results = [row for row in own if "status" not in row]
        wall_s = sum(row["wall_s"] for row in own if "status" in row)
        wrong = sum(row.get("ok") is False for row in results)
        not_run = sum("not_run" in row for row in results)
        missed = sum(row.get("met") is False for row in results)
        table.add_row(name, Text(status), f"{wall_s:.1f}", *map(str, (len(results) - not_run, wrong, not_run, missed)))
    console.print(table)


def _figures(row: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(key for key in row if key not in _NOT_SHOWN)


def _show_group(console: Console, keys: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Shows rows as a table; many figures are shown in lines instead of columns."""
    has_verdicts = any("ok" in row for row in rows)
    as_lines = len(keys) > _MAX_COLUMNS
    verdict = ("",) if has_verdicts else ()
    table = _table("", *verdict, *(("figures",) if as_lines else keys))
    for row in rows:
        texts = [_text(row[key]) for key in keys]
        if as_lines:
            texts = [", ".join(f"{key} {text}" for key, text in zip(keys, texts, strict=True))]
        verdicts = [{True: "right", False: "WRONG"}.get(row.get("ok", ""), "")] if has_verdicts else []
        table.add_row(*(Text(text, overflow="fold") for text in (str(row.get("name", "")), *verdicts, *texts)))
    console.print(table)


def _table(*columns: str) -> Table:
    return Table(*columns, box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="")


def _text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 100 else f"{value:.1f}"
    return _shortened(value if isinstance(value, str) else json.dumps(value, default=str), _MAX_CELL_CHARS)


def _shortened(text: object, most: int) -> str:
    """The text on one line, cut to ``most`` characters; the report contains all of it."""
    line = " ".join(str(text).split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


class Screen:
    """Prints to a console. A failure to print is reported once on standard error and does not end the run."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._warnings: set[str] = set()

    def show(self, print_to: Callable[[Console], None]) -> None:
        """Prints, unless printing has failed before."""
        if self._console.quiet:
            return
        try:
            print_to(self._console)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - rich exits where a pipe was closed
            self._console.quiet = True
            self.warn(f"Tables cannot be printed ({type(error).__name__}: {error}). The run continues.")
            with suppress(OSError, ValueError):  # Python flushes its buffer at the end, which must not fail
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def warn(self, text: str) -> None:
        """Writes a line to standard error, if that is still open and the line was not written before."""
        if text in self._warnings:
            return
        self._warnings.add(text)
        with suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()
