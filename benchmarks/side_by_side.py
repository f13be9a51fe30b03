"""Two servers under the same load, by turns: ``python -m benchmarks.side_by_side --help``.

Each turn starts one server, waits until it answers, sends it every load with ``baton bench serve``, and stops it again:
an idle peer may spin, so the two never run at once. With ``--together`` both run all the time and only the loads
alternate, which is right for servers that sleep when idle, and gives more rounds in less time. The prompts are
English prose that ships with Python (``pydoc_data``), the same for both. Answers are greedy; their lengths differ as
those of prompts do: equal ones that begin together would end together, and never decode beside another's prompt.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from math import isnan, log
from pathlib import Path
from pydoc_data import topics
from statistics import median

import httpx
from rich.console import Console
from rich.table import Table
from scipy.stats import quantile_test

from baton.bench.document import read_serve_document
from baton.core.errors import ConfigError
from benchmarks.options import HelpFormatter, at_least
from cluster.cli.cli_bench import load_benchmark

_SIGMA = 0.8
_WORDS_PER_TOKEN = 0.65
_MAX_PROMPT_TOKENS = 3000
_MAX_OUTPUT_TOKENS = 512
_READY_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Load:
    """A load.

    Attributes:
        mean_input, mean_output: mean number of tokens, of lognormally distributed lengths.
        num_requests: number of requests of a turn, without warm-up.
    """

    name: str
    concurrency: int
    mean_input: int
    mean_output: int
    num_requests: int


LOADS = (
    Load("1 at a time", 1, 300, 64, 16),
    Load("4 at a time", 4, 300, 64, 32),
    Load("16 at a time", 16, 300, 64, 64),
    Load("8, long prompts", 8, 1200, 64, 32),
)
FIGURES = ("TTFT p50 ms", "TPOT p50 ms", "ITL p99 ms", "output tokens/s", "failed")


@dataclass(frozen=True, slots=True)
class Server:
    """A server to measure.

    Attributes:
        command: command that runs in the foreground until SIGTERM.
        url: OpenAI-compatible base URL, with ``/v1``.
    """

    name: str
    command: str
    url: str

    @classmethod
    def parse(cls, text: str) -> Server:
        """Parses an option.

        Args:
            text: ``NAME=URL=COMMAND``.

        Raises:
            argparse.ArgumentTypeError: the text does not have this form.
        """
        name, _, rest = text.partition("=")
        url, _, command = rest.partition("=")
        if not (name and command and url.startswith("http")):
            raise argparse.ArgumentTypeError(
                f"{text!r} is not NAME=URL=COMMAND; expected for example 'baton=http://127.0.0.1:8000/v1=baton up'"
            )
        return cls(name, command, url)


def prompts(load: Load, seed: int) -> list[str]:
    """Prose of lognormal lengths: one text per request, and ``concurrency`` texts for warm-up."""
    rng = random.Random(f"{load.name} {seed}")
    words = [word for key in sorted(topics.topics) for word in topics.topics[key].split()]
    texts = []
    for _ in range(load.num_requests + load.concurrency):
        tokens = rng.lognormvariate(log(load.mean_input) - _SIGMA**2 / 2, _SIGMA)
        count = int(_WORDS_PER_TOKEN * min(_MAX_PROMPT_TOKENS, max(8.0, tokens)))
        begin = rng.randrange(len(words) - count)
        texts.append(" ".join(words[begin : begin + count]))
    return texts


@contextmanager
def running(server: Server, log_file: Path) -> Iterator[None]:
    """Starts a server and, at the end, stops it with all its descendants.

    Raises:
        ConfigError: the server ended, or did not answer in time.
    """
    with log_file.open("ab") as output:
        process = subprocess.Popen(
            shlex.split(server.command), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            _wait_until_ready(server, process, log_file)
            yield
        finally:
            _stop(process)


def _wait_until_ready(server: Server, process: subprocess.Popen[bytes], log_file: Path) -> None:
    deadline_s = time.monotonic() + _READY_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise ConfigError(f"{server.name} ended with status {process.returncode} before it served; see {log_file}.")
        try:
            if httpx.get(f"{server.url}/models", timeout=5).status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass
        time.sleep(1.0)
    raise ConfigError(f"{server.name} did not answer at {server.url} within {_READY_TIMEOUT_S:g} s; see {log_file}.")


def _stop(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            continue
        time.sleep(1.0)  # its children may take a moment longer


def measure(server: Server, load: Load, seed: int, folder: Path) -> dict[str, float]:
    """Measures one load on a running server; returns :data:`FIGURES`."""
    prompt_file, report = folder / "prompts.jsonl", folder / "report.json"
    lines = (json.dumps({"prompt": text}) for text in prompts(load, seed))
    prompt_file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    options = {
        "--url": server.url,
        "--concurrency": load.concurrency,
        "--requests": load.num_requests,
        "--warmup-requests": load.concurrency,
        "--duration": 600,
        "--prompts": prompt_file,
        "--output": f"lognormal:mean={load.mean_output},sigma={_SIGMA}",
        "--max-output": _MAX_OUTPUT_TOKENS,
        "--seed": seed,
        "--json": report,
    }
    words = [str(word) for option in options.items() for word in option]
    command = [sys.executable, "-m", "cluster.cli.cli", "bench", "serve", *words]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        output = f"{result.stdout[-2000:]}{result.stderr[-2000:]}"
        raise ConfigError(f"Load {load.name!r} on {server.name} failed:\n{output}")
    [stage] = read_serve_document(report)["stages"]
    latencies = stage["latencies"]
    values = (
        latencies["ttft_ms"]["p50"],
        latencies["tpot_ms"]["p50"],
        latencies["itl_ms"]["p99"],
        stage["throughput"]["output_tokens_per_s"],
        stage["num_failed"],
    )
    return dict(zip(FIGURES, values, strict=True))


Results = dict[str, dict[str, list[dict[str, float]]]]
"""The figures of each turn, by load and server."""


def run_turns(
    servers: Sequence[Server],
    loads: Sequence[Load],
    rounds: int,
    log_file: Path,
    console: Console,
    together: bool = False,
) -> Results:
    """Measures in turns (A B B A …). Every turn of a round sends the same prompts.

    Args:
        together: whether both servers run throughout.
    """
    results: Results = {load.name: {server.name: [] for server in servers} for load in loads}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as alive:
        if together:
            for server in servers:
                alive.enter_context(running(server, log_file))
        for turn in range(rounds):
            for server in servers if turn % 2 == 0 else reversed(servers):
                with nullcontext() if together else running(server, log_file):
                    for load in loads:
                        figures = measure(server, load, turn, Path(folder))
                        results[load.name][server.name].append(figures)
                        shown = ", ".join(f"{name} {value:.1f}" for name, value in figures.items())
                        console.print(f"[dim]round {turn + 1}, {server.name}, {load.name}: {shown}[/dim]")
    return results


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % confidence interval of the median, by the sign test; ``None`` for fewer than six values."""
    interval = quantile_test(values, q=0, p=0.5).confidence_interval(0.95)
    return None if isnan(interval.low) else (float(interval.low), float(interval.high))


def render(results: Results) -> Table:
    """A table of each server's medians, and of the ratio of the first server to the last: the median over the rounds,
    and its 95 % confidence interval from six rounds on."""
    names = list(next(iter(results.values())))
    shown = Table(title="medians over the rounds; ratio: first to last server within a round")
    shown.add_column("load")
    shown.add_column("figure")
    for name in (*names, "ratio"):
        shown.add_column(name, justify="right")
    for load, by_server in results.items():
        for figure in FIGURES:
            columns = [[turn[figure] for turn in by_server[name]] for name in names]
            ratios = [first / last for first, last in zip(columns[0], columns[-1], strict=True) if last]
            interval = median_interval(ratios)
            ratio = f"{median(ratios):.{2 if interval is None else 3}f}x" if ratios else ""
            if interval is not None:
                ratio += f" ({interval[0]:.3f} to {interval[1]:.3f})"
            shown.add_row(load, figure, *(f"{median(column):.1f}" for column in columns), ratio)
        shown.add_section()
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument(
        "servers",
        nargs=2,
        type=Server.parse,
        metavar="NAME=URL=COMMAND",
        help="for example: 'baton=http://127.0.0.1:8210/v1=baton up --set router.port=8210'",
    )
    parser.add_argument(
        "--rounds", type=at_least(1), default=2, help="number of rounds; each server gets one turn per round"
    )
    names = [load.name for load in LOADS]
    parser.add_argument(
        "--loads", nargs="*", choices=names, metavar="LOAD", help=f"loads: {', '.join(map(repr, names))}; default: all"
    )
    parser.add_argument(
        "--together", action="store_true", help="keep both servers running; only for servers that use no CPU while idle"
    )
    parser.add_argument(
        "--log", type=Path, default=Path("out/side_by_side.log"), help="log file for the servers' output"
    )
    parser.add_argument("--json", type=Path, help="write the figures of every turn to this file")
    arguments = parser.parse_args()
    arguments.log.parent.mkdir(parents=True, exist_ok=True)
    console = Console()
    loads = [load for load in LOADS if not arguments.loads or load.name in arguments.loads]
    try:
        load_benchmark("baton.bench.client:LoadClient")  # fails on missing libraries before anything is started
        results = run_turns(arguments.servers, loads, arguments.rounds, arguments.log, console, arguments.together)
    except ConfigError as error:
        parser.exit(1, f"{error}\n")
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    console.print(render(results))


if __name__ == "__main__":
    main()
