"""The demo's measurements and their table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table

_MIB = 2**20
_WIDE = 100
"""The number of terminal columns from which the table's columns are separated by spaces."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """The costs of one request. TTFT, TPOT and the total time are measured at the client.

    Attributes:
        drafted_tokens: output tokens that were accepted drafts.
        tpot_ms: mean time per output token after the first; ``None`` with a single token.
        kv_bytes, transfer_ms, prefill_ms: values of the router's timeline; ``None`` if it lacks them.
    """

    name: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    drafted_tokens: int
    ttft_ms: float
    tpot_ms: float | None
    total_ms: float
    prefill_ms: float | None
    transfer_ms: float | None
    kv_bytes: int | None

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.total_ms * 1e3

    @property
    def kv_mib(self) -> float | None:
        return None if self.kv_bytes is None else self.kv_bytes / _MIB


@dataclass(frozen=True, slots=True)
class _Column:
    """One column: its heading of two lines, its value, and whether a sum is shown besides the mean."""

    heading: str
    value: Callable[[Measurement], float | None]
    adds_up: bool = False


_COLUMNS = (
    _Column("prompt\ntokens", lambda one: one.prompt_tokens, adds_up=True),
    _Column("cached\ntokens", lambda one: one.cached_tokens, adds_up=True),
    _Column("output\ntokens", lambda one: one.output_tokens, adds_up=True),
    _Column("accepted\ndrafts", lambda one: one.drafted_tokens, adds_up=True),
    _Column("TTFT\nms", lambda one: one.ttft_ms),
    _Column("TPOT\nms", lambda one: one.tpot_ms),
    _Column("tokens\n/s", lambda one: one.tokens_per_second),
    _Column("prefill\nms", lambda one: one.prefill_ms),
    _Column("KV\nMiB", lambda one: one.kv_mib, adds_up=True),
    _Column("transfer\nms", lambda one: one.transfer_ms),
)


def cost_table(measurements: Sequence[Measurement], width: int) -> Table:
    """A table with a row for each request, then sums and means. It fits into 80 columns.

    Args:
        width: columns of the terminal.
    """
    table = Table(
        title="What each request cost",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0) if width >= _WIDE else 0,
        pad_edge=False,
    )
    table.add_column("request", no_wrap=True)
    for column in _COLUMNS:
        table.add_column(column.heading, justify="right", no_wrap=True)
    for measurement in measurements:
        table.add_row(measurement.name, *(_shown(column.value(measurement)) for column in _COLUMNS))
    if measurements:
        table.add_section()
        table.add_row("sum", *(_shown(_sum(column, measurements)) if column.adds_up else "" for column in _COLUMNS))
        table.add_row("mean", *(_shown(_mean(column, measurements)) for column in _COLUMNS))
    return table


def _values(column: _Column, measurements: Sequence[Measurement]) -> list[float]:
    return [value for value in map(column.value, measurements) if value is not None]


def _sum(column: _Column, measurements: Sequence[Measurement]) -> float:
    return sum(_values(column, measurements))


def _mean(column: _Column, measurements: Sequence[Measurement]) -> float | None:
    values = _values(column, measurements)
    return sum(values) / len(values) if values else None


def _shown(value: float | None) -> str:
    """A number with one decimal place below 99.95, else none. Counts are whole."""
    if value is None:
        return "-"
    if isinstance(value, int) or value >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}"
