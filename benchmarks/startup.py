"""How long ``baton up`` takes until it is ready, phase by phase: ``python -m benchmarks.startup [--help]``.

Every run is a cluster of its own in the foreground, on a free port, with the models and compiled programs that this
machine has cached and without anything else of other runs. Phases come from what it and its workers log. The first run
is not counted: it compiles what is not cached yet.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.table import Table

from baton.core.errors import DeadlineError, WorkerLostError
from baton.engine.models.model_cache import CACHE_VARIABLE, cache_dir
from benchmarks.options import at_least

_SHARED = ("models", "kernels")
"""Folders of the cache that runs share; the rest is separate, so that a run does not find another cluster's state."""
_OVERRIDES = ("router.port=0", "log.level=info", "log.json=true")
_LOGS = "router and workers log to "
_READY = "ready: "
_STOP_TIMEOUT_S = 60.0
_WIDTH = 100
_TAIL = 15

# The beginnings of the command's lines on standard error, by the phase that each of them ends.
_OUTPUT = {
    "command line, model": "starting a local Ray cluster",
    "Ray": _LOGS,
    "controller": "starting the router and the workers",
}
# The same for the log of each worker; the workers and the router start concurrently.
_LOGGED = {
    "worker: process, imports": "the process is up",
    "worker: model": "the model is loaded",
    "worker: self-check": "the self-check is passed",
    "worker: step profile": "the steps are profiled",
}
_LAST = "registration"
PHASES = (*_OUTPUT, *_LOGGED, _LAST)


@dataclass(frozen=True, slots=True)
class Startup:
    """The measurements of one start.

    Attributes:
        total_s: from starting the command until it reported that it was ready.
        phases_s: durations of the phases in order; phases of workers are of the worker that was ready last.
    """

    total_s: float
    phases_s: dict[str, float]


@dataclass(frozen=True, slots=True)
class OutputLine:
    """A line of the command's progress, and when it was read."""

    at: datetime
    text: str


def phases_of(started: datetime, output: Sequence[OutputLine], logged: Sequence[dict[str, Any]]) -> Startup:
    """Computes the phases of a start.

    Args:
        output: lines of the command's progress.
        logged: lines of the workers' logs, in any order.

    Raises:
        WorkerLostError: lines are missing.
    """
    phases: dict[str, float] = {}
    last = started
    for name, beginning in _OUTPUT.items():
        last = _take(phases, name, last, [line.at for line in output if line.text.startswith(beginning)])
    worker = _last_worker(logged)
    for name, message in _LOGGED.items():
        moments = [
            datetime.fromisoformat(line["time"])
            for line in logged
            if line["process"] == worker and line["message"] == message
        ]
        if moments or name not in ("worker: self-check",):  # the self-check may be off
            last = _take(phases, name, last, moments)
    ready = _take(phases, _LAST, last, [line.at for line in output if line.text.startswith(_READY)])
    return Startup((ready - started).total_seconds(), phases)


def _take(phases: dict[str, float], name: str, last: datetime, moments: Sequence[datetime]) -> datetime:
    if not moments:
        raise WorkerLostError(f"nothing was logged at the end of the phase {name!r}.")
    phases[name] = (min(moments) - last).total_seconds()
    return min(moments)


def _last_worker(logged: Sequence[dict[str, Any]]) -> str:
    ends = [line for line in logged if line["message"] == _LOGGED["worker: step profile"]]
    if not ends:
        raise WorkerLostError("no worker logged that it was ready.")
    return str(max(ends, key=lambda line: str(line["time"]))["process"])


def start_once(config: Path | None, overrides: Sequence[str], timeout_s: float) -> Startup:
    """Starts a cluster, waits until it is ready, and stops it.

    Raises:
        DeadlineError: the cluster was not ready in time.
        WorkerLostError: the cluster ended before it was ready.
    """
    options = [] if config is None else ["--config", str(config)]
    for override in (*overrides, *_OVERRIDES):
        options += ["--set", override]
    with _own_cache() as cache:
        started = datetime.now(UTC)
        process = subprocess.Popen(
            [sys.executable, "-m", "cluster.cli.cli", "up", *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, CACHE_VARIABLE: str(cache)},
        )
        try:
            output = _listen(process, timeout_s)
            folder = next(line.text.removeprefix(_LOGS) for line in output if line.text.startswith(_LOGS))
            return phases_of(started, output, list(_log_lines(Path(folder))))
        finally:
            _end(process)


@contextmanager
def _own_cache() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="baton-startup-") as folder:
        for name in _SHARED:
            shared = cache_dir() / name
            shared.mkdir(parents=True, exist_ok=True)
            (Path(folder) / name).symlink_to(shared, target_is_directory=True)
        yield Path(folder)


def _listen(process: subprocess.Popen[bytes], timeout_s: float) -> list[OutputLine]:
    """The lines of the command's progress up to the report that it is ready."""
    if process.stderr is None:
        raise RuntimeError("the process was started without a pipe")
    output: list[OutputLine] = []
    for text in _lines_within(process.stderr, timeout_s):
        output.append(OutputLine(datetime.now(UTC), text))
        if text.startswith(_READY):
            return output
    tail = "\n".join(f"  {line.text}" for line in output[-_TAIL:]) or "  (nothing)"
    if process.poll() is None:
        raise DeadlineError(f"`baton up` was not ready after {timeout_s:g} s. Its output:\n{tail}")
    raise WorkerLostError(f"`baton up` ended before it was ready. Its output:\n{tail}")


def _lines_within(stream: IO[bytes], timeout_s: float) -> Iterator[str]:
    """Yields lines until the stream ends or the time has passed."""
    ends_s = time.monotonic() + timeout_s
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while selector.select(max(0.0, ends_s - time.monotonic())):
            data = os.read(stream.fileno(), 65536)
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            yield from (line.decode(errors="replace").strip() for line in lines)


def _log_lines(folder: Path) -> Iterator[dict[str, Any]]:
    """Yields baton's own log lines from the files with the standard error of Ray's workers."""
    for file in folder.glob("worker-*.err"):
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                value = json.loads(line)
            except ValueError:
                continue
            if isinstance(value, dict) and {"time", "process", "message"} <= value.keys():
                yield value


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.communicate(timeout=_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


def figures_of(runs: Sequence[Startup]) -> dict[str, float]:
    """The medians of the total and of each phase, in seconds."""
    phases = {name: [run.phases_s[name] for run in runs if name in run.phases_s] for name in PHASES}
    medians = {name: statistics.median(values) for name, values in phases.items() if values}
    return {"total": statistics.median(run.total_s for run in runs), **medians}


def show(runs: Sequence[Startup]) -> Table:
    """A table of the phases: the median, the minimum and the maximum over the runs."""
    table = Table("phase", "median s", "from", "to", title=f"baton up until ready, {len(runs)} runs")
    for name, median in figures_of(runs).items():
        values = [run.total_s if name == "total" else run.phases_s.get(name, median) for run in runs]
        table.add_row(name, *(f"{value:.2f}" for value in (median, min(values), max(values))))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-c", "--config", type=Path, default=None, help="of the cluster; default: the built-in one")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--repeats", type=at_least(1), default=3)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one start")
    parser.add_argument("--json", type=Path, help="also write every run here")
    arguments = parser.parse_args()
    console, runs = Console(width=_WIDTH), []
    for number in range(arguments.repeats + 1):
        run = start_once(arguments.config, arguments.overrides, arguments.timeout)
        console.print(f"start {number} of {arguments.repeats}: {run.total_s:.1f} s{'' if number else ', not counted'}")
        runs += [run] if number else []
    console.print(show(runs))
    if arguments.json:
        document = {"format": "baton-startup", "runs": [asdict(run) for run in runs], "figures": figures_of(runs)}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
