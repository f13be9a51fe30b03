"""What benchmarks showed at earlier commits: ``python -m benchmarks.history record|compare REPORT… [--help]``.

``record`` adds a line to the history, ``compare`` shows what reports say now beside the last line of the same kind of
machine. Reports are what the benchmarks write with ``--json``, or folders of them; ``make bench`` makes all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from baton.core.errors import BatonError, ConfigError
from benchmarks.history_figures import Figures, figures_of, is_better_lower

HISTORY = Path(__file__).parent / "history.jsonl"
NOTICEABLE = 0.1
"""A change of less is what runs on one machine differ by anyway."""
_CPU_INFO = Path("/proc/cpuinfo")
_CPU_FEATURES = (
    *("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8"),
    *("asimd", "bf16", "i8mm", "sve"),
)
"""Those that decide which kernels run."""
_WIDTH = 110


@dataclass(frozen=True, slots=True)
class Machine:
    """The kind of a machine, and nothing by which it could be found.

    Attributes:
        cpu_features: those of its instruction set that matter here.
    """

    architecture: str
    cores: int
    cpu_features: tuple[str, ...]
    accelerator: str = ""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Machine:
        """Raises ``KeyError`` or ``TypeError`` when it is none."""
        features = tuple(str(name) for name in values["cpu_features"])
        return cls(str(values["architecture"]), int(values["cores"]), features, str(values.get("accelerator", "")))


@dataclass(frozen=True, slots=True)
class Entry:
    """One recorded run.

    Attributes:
        commit: of the sources, with a ``+`` where they had changes beside it; empty when git does not say.
    """

    date: str
    commit: str
    machine: Machine
    figures: Figures


@dataclass(frozen=True, slots=True)
class Change:
    """Of one figure.

    Attributes:
        before: None when the last run did not have it.
    """

    name: str
    before: float | None
    now: float

    @property
    def ratio(self) -> float | None:
        """now / before; None when there is none."""
        return self.now / self.before if self.before else None

    @property
    def verdict(self) -> str:
        """``better``, ``worse``, or nothing."""
        if self.ratio is None or abs(self.ratio - 1) < NOTICEABLE:
            return ""
        return "better" if (self.ratio < 1) == is_better_lower(self.name) else "worse"


def read_history(file: Path) -> list[Entry]:
    """Oldest first; empty when there is no such file yet.

    Raises:
        ConfigError: a line is no entry.
    """
    if not file.exists():
        return []
    entries = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        try:
            values = json.loads(line)
            figures = {str(name): float(value) for name, value in values["figures"].items()}
            machine = Machine.from_dict(values["machine"])
            entries.append(Entry(str(values["date"]), str(values["commit"]), machine, figures))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"Line {number} of {file.name} is no entry of a history; restore it from git.") from error
    return entries


def add_entry(file: Path, entry: Entry) -> None:
    """As the last line."""
    with file.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(asdict(entry), sort_keys=True) + "\n")


def last_of(entries: Iterable[Entry], machine: Machine) -> dict[str, tuple[Entry, float]]:
    """The newest value of every figure, and where it is from; runs need not have measured the same things."""
    newest: dict[str, tuple[Entry, float]] = {}
    for entry in entries:
        if entry.machine == machine:
            newest |= {name: (entry, value) for name, value in entry.figures.items()}
    return newest


def changes(before: Mapping[str, float], now: Figures) -> list[Change]:
    """In the order of ``now``."""
    return [Change(name, before.get(name), value) for name, value in now.items()]


def read_reports(paths: Sequence[Path]) -> Figures:
    """Of all reports together; folders stand for the JSON files in them.

    Raises:
        ConfigError: a report cannot be read, or there is none.
    """
    files = [file for path in paths for file in (sorted(path.glob("*.json")) if path.is_dir() else [path])]
    figures: Figures = {}
    for file in files:
        try:
            document = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file} cannot be read as a report: {error}.") from error
        if not isinstance(document, dict):
            raise ConfigError(f"{file} is no report of a benchmark: it holds a {type(document).__name__}.")
        figures |= figures_of(document)
    if not figures:
        raise ConfigError(f"There is no report in {', '.join(map(str, paths))}. `make bench` writes some.")
    return figures


def this_machine() -> Machine:
    """What this one is."""
    return Machine(platform.machine(), os.cpu_count() or 1, cpu_features(_read(_CPU_INFO)), _accelerator())


def cpu_features(cpu_info: str) -> tuple[str, ...]:
    """Those of :data:`_CPU_FEATURES` that the text of ``/proc/cpuinfo`` names."""
    named = {
        word
        for line in cpu_info.splitlines()
        if line.partition(":")[0].strip() in ("flags", "Features")
        for word in line.partition(":")[2].split()
    }
    return tuple(name for name in _CPU_FEATURES if name in named)


def _accelerator() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _commit() -> str:
    def git(*arguments: str) -> str:
        here = Path(__file__).parent
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=True, cwd=here)
        return done.stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def show(found: Sequence[Change], origins: Mapping[str, Entry]) -> Table:
    """One row for each figure.

    Args:
        origins: where earlier values are from, by the figures' names.
    """
    table = Table("figure", "recorded", "at", "now", "now / recorded", "")
    for change in found:
        origin = origins.get(change.name)
        table.add_row(
            change.name,
            "" if change.before is None else f"{change.before:.4g}",
            "" if origin is None else f"{origin.date[:10]} {origin.commit}",
            f"{change.now:.4g}",
            "new" if change.ratio is None else f"{change.ratio:.2f}",
            change.verdict,
        )
    return table


def _compare(figures: Figures, history: Path, console: Console) -> None:
    entries, machine = read_history(history), this_machine()
    newest = last_of(entries, machine)
    if not newest:
        console.print(f"No run of this kind of machine is recorded in {history.name}: {machine}")
    before = {name: value for name, (_, value) in newest.items()}
    console.print(show(changes(before, figures), {name: entry for name, (entry, _) in newest.items()}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["record", "compare"])
    parser.add_argument("reports", type=Path, nargs="+", metavar="REPORT", help="JSON files, or folders of them")
    parser.add_argument("--history", type=Path, default=HISTORY)
    arguments = parser.parse_args()
    console = Console(width=_WIDTH)
    try:
        figures = read_reports(arguments.reports)
        _compare(figures, arguments.history, console)
        if arguments.action == "record":
            date = datetime.now(UTC).isoformat(timespec="seconds")
            add_entry(arguments.history, Entry(date, _commit(), this_machine(), figures))
            console.print(f"recorded {len(figures)} figures in {arguments.history.name}")
    except BatonError as error:
        sys.exit(f"error: {error.message}")


if __name__ == "__main__":
    main()
