"""A job whose router and workers are killed again and again: ``python -m tests.jobs_under_kills [--help]``.

Runs `baton up` in a folder of its own, submits a job through the openai client, sends SIGKILL to a router or a worker
at seeded moments, and once to all processes, after which it starts the cluster again. At the end each line of the job
must have exactly one result. Exits with 1 if one has none, two or an error.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import psutil
import yaml
from openai.types import Batch

from baton.engine.models.model_cache import CACHE_VARIABLE, cache_dir
from tests.job_services import CHAT_URL, jsonl, line, postgres

ENDED = ("completed", "failed", "expired", "cancelled")
ROUTER, WORKERS = "ray::RouterActor", ("ray::WorkerActor", "ray::SimulatedWorkerProcess")
"""Beginnings of the titles of processes."""
_APPEARS_S = 60.0
"""How long a killed process may take to be replaced."""
_POLL_S = 0.2


@dataclass
class Outcome:
    """What became of the job.

    Attributes:
        kills: killed processes, by kind.
        problems: what is wrong; empty if each line has exactly one result.
    """

    status: str = ""
    num_results: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0


class KilledCluster:
    """A cluster of `baton up`, whose processes can be killed.

    Args:
        settings: of its configuration.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self._folder = folder
        self._config = folder / "config.yaml"
        self._config.write_text(yaml.safe_dump(settings))
        cache = folder / "cache"  # with a record of its own of what runs
        cache.mkdir()
        for kept in ("models", "kernels"):
            (cache_dir() / kept).mkdir(parents=True, exist_ok=True)
            (cache / kept).symlink_to(cache_dir() / kept)
        self._environment = {**os.environ, CACHE_VARIABLE: str(cache), "PYTHONPATH": str(Path(__file__).parents[1])}
        self._process: subprocess.Popen[bytes] | None = None
        self._log = folder / "up.log"
        self.endpoint = ""

    def up(self) -> None:
        """Starts it and waits until it is ready. Raises :class:`RuntimeError` with its log."""
        with self._log.open("wb") as log:
            command = [sys.executable, "-m", "cluster.cli.cli", "up", "-c", str(self._config)]
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=self._environment)
        out = self._process.stdout
        self.endpoint = (out.readline() if out is not None else b"").decode().strip()
        if not self.endpoint:
            raise RuntimeError(self._log.read_text()[-3000:])

    def kill(self, kind: str | tuple[str, ...], draw: random.Random) -> bool:
        """Kills a process; see :func:`kill_one`."""
        return kill_one(self._processes, kind, draw)

    def kill_all(self) -> None:
        """Kills every process at once, as a machine does that loses its power."""
        processes = self._processes()
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, timeout=30)
        if self._process is not None:
            self._process.wait()

    def down(self) -> None:
        """Ends it in order."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(60)
        self.kill_all()

    def _processes(self) -> list[psutil.Process]:
        try:
            root = psutil.Process(self._process.pid if self._process else -1)
            return [root, *root.children(recursive=True)]
        except (psutil.NoSuchProcess, ValueError):
            return []


def kill_one(processes: Callable[[], list[psutil.Process]], kind: str | tuple[str, ...], draw: random.Random) -> bool:
    """Kills one of the processes whose titles begin like this, and waits for its end. Waits until there is one.

    Returns:
        Whether one was killed.
    """
    end_s = time.monotonic() + _APPEARS_S
    while time.monotonic() < end_s:
        found = [process for process in processes() if _title(process).startswith(kind)]
        if found:
            victim = draw.choice(sorted(found, key=lambda process: process.pid))
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.kill()
                return not psutil.wait_procs([victim], timeout=30)[1]
        time.sleep(_POLL_S)
    return False


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def run(
    folder: Path, *, lines: int, kills: int, seed: int, tokens: int, settings: dict[str, Any], pause_s: float = 6.0
) -> Outcome:
    """Runs a job of so many lines with so many kills and one full restart.

    Args:
        pause_s: mean time between two kills, in seconds.
    """
    draw, outcome = random.Random(seed), Outcome()
    cluster = KilledCluster(folder, settings)
    cluster.up()
    began_s = time.monotonic()
    try:
        with openai.OpenAI(base_url=f"{cluster.endpoint}/v1", api_key="none", max_retries=20) as client:
            batch = submit(client, lines, tokens)
            for number in range(kills):
                batch = wait(client, batch, draw.uniform(0.5, 2 * pause_s - 0.5))
                if batch.status in ENDED:
                    outcome.problems.append(f"the job ended after {number} of {kills} kills; use more lines")
                    break
                if number == kills // 2:
                    cluster.kill_all()
                    cluster.up()
                    outcome.kills["full restart"] += 1
                kind = draw.choice(("router", "worker"))
                if cluster.kill(ROUTER if kind == "router" else WORKERS, draw):
                    outcome.kills[kind] += 1
                else:
                    outcome.problems.append(f"no {kind} could be killed")
            batch = wait(client, batch, 3600.0)
            outcome.seconds, outcome.status = time.monotonic() - began_s, batch.status
            outcome.num_results, problems = check(client, batch, lines)
            outcome.problems += problems
    finally:
        cluster.down()
    return outcome


def submit(client: openai.OpenAI, lines: int, tokens: int) -> Batch:
    """Makes a job of so many lines with answers of so many tokens."""
    content = jsonl(*(_line(number, tokens) for number in range(lines)))
    file = client.files.create(file=("lines.jsonl", content), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=CHAT_URL, completion_window="24h")


def _line(number: int, tokens: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"Say something about the number {number}."}]
    return line(f"line-{number}", messages=messages, max_tokens=tokens, temperature=0, ignore_eos=True)


def wait(client: openai.OpenAI, batch: Batch, seconds: float) -> Batch:
    """Returns the job as it is after so many seconds, or when it has ended."""
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s and batch.status not in ENDED:
        time.sleep(_POLL_S)
        with contextlib.suppress(openai.APIConnectionError, openai.InternalServerError):
            batch = client.batches.retrieve(batch.id)
    return batch


def check(client: openai.OpenAI, batch: Batch, lines: int) -> tuple[int, list[str]]:
    """The number of results of a job of so many lines, and what is wrong with them."""
    problems = [] if batch.status == "completed" else [f"the job is {batch.status}"]
    found: Counter[str] = Counter()
    for file_id in filter(None, (batch.output_file_id, batch.error_file_id)):
        for text in client.files.content(file_id).text.splitlines():
            entry = json.loads(text)
            found[entry["custom_id"]] += 1
            status = (entry["response"] or {}).get("status_code")
            if status != 200:
                problems.append(f"{entry['custom_id']} has the status {status}: {text[:300]}")
    wrong = {f"line-{number}" for number in range(lines)} ^ found.keys()
    problems += [f"{name} is missing or unknown" for name in sorted(wrong)]
    problems += [f"{name} has {count} results" for name, count in found.items() if count > 1]
    return found.total(), problems


def simulated(folder: Path, database: str | None = None, replicas: int = 1) -> dict[str, Any]:
    """Settings of a cluster of simulated workers, each in a process of its own."""
    return {
        "router": {"port": _free_port(), "replicas": replicas},
        "ray": {"num_cpus": 8},
        "simulation": {"profile": "h100-8b", "workers_per_process": 1},
        "prefill": {"workers": 2},
        "decode": {"workers": 2},
        "jobs": {"dir": str(folder / "jobs"), "database": database, "max_in_flight": 8},
    }


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextlib.contextmanager
def _database(name: str) -> Iterator[str | None]:
    if name == "sqlite":
        yield None
        return
    with postgres() as url:
        yield url


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.jobs_under_kills", description=__doc__)
    parser.add_argument("--lines", type=int, default=2000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=100, help="tokens of each answer")
    parser.add_argument("--pause", type=float, default=6.0, help="mean seconds between two kills")
    parser.add_argument("--routers", type=int, default=1)
    parser.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--real", action="store_true", help="real workers with the default model")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, _database(options.database) as database:
        folder = Path(name)
        settings = simulated(folder, database, options.routers)
        if options.real:
            del settings["simulation"]
        found = run(
            folder,
            lines=options.lines,
            kills=options.kills,
            seed=options.seed,
            tokens=options.tokens,
            settings=settings,
            pause_s=options.pause,
        )
    killed = ", ".join(f"{count} x {kind}" for kind, count in found.kills.items())
    summary = f"{found.status} after {found.seconds:.0f} s: {found.num_results} results of {options.lines} lines"
    sys.stdout.write("\n".join([summary, f"killed: {killed}", *found.problems[:20], ""]))
    return 1 if found.problems else 0


if __name__ == "__main__":
    sys.exit(main())
