"""What longer contexts add to a decode step, beside the time that the machine needs to read them.

In a round all contexts and a plain reading of memory take turns, and each round has its own ratio, so that a machine
whose speed changes from one minute to the next changes both sides. The reading is the best of a few, the steps are
not: what disturbs a moment makes a ratio larger, not smaller.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.console import Console
from rich.table import Table

from benchmarks.turns import in_turn

_READING = "reading"


@dataclass(frozen=True, slots=True)
class Slope:
    """What a decode step of ``batch`` sequences costs more behind longer contexts, round by round.

    Attributes:
        added_ms: measured.
        least_ms: what reading the KV between takes at the bandwidth of the same round.
    """

    batch: int
    from_context: int
    to_context: int
    added_ms: list[float]
    least_ms: list[float]

    @property
    def ratios(self) -> list[float]:
        """In ascending order."""
        return sorted(added / least for added, least in zip(self.added_ms, self.least_ms, strict=True))

    @property
    def ratio(self) -> float:
        """Median."""
        return statistics.median(self.ratios)


def measure_slopes(
    batch: int,
    steps: dict[int, Callable[[], float]],
    read_rate: Callable[[], float],
    kv_bytes_per_token: int,
    rounds: int,
) -> list[Slope]:
    """From each context to the next longer one, and from the shortest to the longest of more than two.

    Args:
        steps: by context, what takes a step of ``batch`` sequences and gives its milliseconds.
        read_rate: gives the bytes a second that memory is read with.
    """
    contexts = sorted(steps)
    works = {_READING: read_rate, **{str(context): steps[context] for context in contexts}}
    measured = in_turn(works, rounds)
    pairs = [*pairwise(contexts), *([(contexts[0], contexts[-1])] if len(contexts) > 2 else [])]
    slopes = []
    for start, end in pairs:
        added_ms = [last - first for first, last in zip(measured[str(start)], measured[str(end)], strict=True)]
        num_bytes = batch * (end - start) * kv_bytes_per_token
        slopes.append(Slope(batch, start, end, added_ms, [1e3 * num_bytes / rate for rate in measured[_READING]]))
    return slopes


def show_slopes(slopes: Sequence[Slope], console: Console) -> None:
    """Medians over the rounds, and between what half of them lie."""
    table = Table(
        "batch",
        "context",
        "added ms",
        "limit ms",
        "× limit",
        "half of the rounds",
        title="what longer contexts add to a step, all contexts in turn",
    )
    for slope in slopes:
        ratios = slope.ratios
        quarter = len(ratios) // 4
        table.add_row(
            str(slope.batch),
            f"{slope.from_context} → {slope.to_context}",
            f"{statistics.median(slope.added_ms):.1f}",
            f"{statistics.median(slope.least_ms):.1f}",
            f"{slope.ratio:.2f}",
            f"{ratios[quarter]:.2f} to {ratios[-1 - quarter]:.2f}",
        )
    console.print(table)
