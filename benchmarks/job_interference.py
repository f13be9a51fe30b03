"""How much a running job delays interactive requests: ``python -m benchmarks.job_interference [--help]``.

Runs a cluster on this machine, of simulated workers or of workers with the default model. Interactive requests come at
random (Poisson). Each round measures them twice, without a job and beside a running one, in alternating order. Both
halves of a round have the same arrivals and lengths, but other words, so that no prefix cache helps the second one.
Exits with 1 if the median over all rounds of the p95 of TTFT beside a job exceeds the bar, or if a request fails.
"""

from __future__ import annotations

import asyncio
import io
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from baton.bench.client import LoadClient
from baton.bench.endpoint import Endpoint, RequestSpec
from baton.bench.latency import percentile_ms
from baton.bench.sample import Sample
from baton.client.router_client import COMPLETION_PATH, RouterClient
from baton.core.slo import INTERACTIVE
from benchmarks.options import run_command
from cluster.config.config import BatonConfig
from cluster.controller.launch import Cluster

BAR = 1.15
"""Largest TTFT p95 beside a job, as a multiple of the one without."""
_TIMEOUT_S = 60.0
_POLL_S = 0.2
_WARM_UP_S = 3.0
_ENDED = ("completed", "failed", "expired", "cancelled")


@dataclass(frozen=True, slots=True)
class Half:
    """Interactive requests of one half of a round.

    Attributes:
        ttft_s: times from sending a request to its first token, in seconds.
        num_failed: requests without a complete answer.
        num_lines: lines of the job that got a result meanwhile.
        seconds: duration.
    """

    ttft_s: Sequence[float]
    num_failed: int
    num_lines: int
    seconds: float

    def ttft_ms(self, share: float) -> float:
        return percentile_ms(self.ttft_s, share)


@dataclass(frozen=True, slots=True)
class Round:
    without: Half
    beside: Half

    def ratio(self, share: float) -> float:
        """A percentile of TTFT beside the job, as a multiple of the one without."""
        return self.beside.ttft_ms(share) / self.without.ttft_ms(share)


@dataclass(frozen=True, slots=True)
class Load:
    """
    Attributes:
        rate: interactive requests per second.
        seconds: duration of each half.
        tokens: of each answer.
        words: mean length of the prompts.
        line_tokens: tokens of the answer to each line of the job.
        num_lines: lines of the job, which must last longer than its half of a round.
    """

    rate: float
    seconds: float
    tokens: int
    words: int
    line_tokens: int
    num_lines: int

    def requests(self, number: int, half: str) -> list[RequestSpec]:
        """The requests of half a round; ``at_s`` is their time. The halves of a round differ in the words alone."""
        shape, content = random.Random(number), random.Random(f"{number} {half}")
        found, at_s = [], shape.expovariate(self.rate)
        while at_s < self.seconds:
            length = shape.randrange(self.words // 2, self.words * 3 // 2 + 1)
            found.append(RequestSpec(_words(content, length), None, self.tokens, at_s))
            at_s += shape.expovariate(self.rate)
        return found

    def lines(self, number: int, model: str) -> bytes:
        """The input file of a job."""
        content, found = random.Random(f"{number} job"), io.BytesIO()
        for line in range(self.num_lines):
            body = {
                "model": model,
                "prompt": _words(content, self.words),
                "max_tokens": self.line_tokens,
                "temperature": 0,
                "ignore_eos": True,
            }
            values = {"custom_id": str(line), "method": "POST", "url": COMPLETION_PATH, "body": body}
            found.write(json.dumps(values).encode() + b"\n")
        return found.getvalue()


def _words(content: random.Random, length: int) -> str:
    return " ".join(str(content.randrange(1000)) for _ in range(length))


def is_met(rounds: Sequence[Round], bar: float = BAR) -> bool:
    """Whether the bar holds, in a measurement without failures in which every job made progress."""
    halves = [half for each in rounds for half in (each.without, each.beside)]
    makes_progress = all(each.beside.num_lines > 0 for each in rounds)
    is_complete = not any(half.num_failed for half in halves) and makes_progress
    return is_complete and statistics.median(each.ratio(95) for each in rounds) <= bar


def show(rounds: Sequence[Round]) -> Table:
    """A row for each round, and the medians."""
    table = Table(box=box.SIMPLE_HEAD)
    for title in ("round", "requests", "p50 without", "p50 beside", "p95 without", "p95 beside", "p50", "p95"):
        table.add_column(title, justify="right")
    table.add_column("lines/s", justify="right")
    rows = [
        (
            len(each.without.ttft_s) + len(each.beside.ttft_s),
            *(half.ttft_ms(share) for share in (50, 95) for half in (each.without, each.beside)),
            each.ratio(50),
            each.ratio(95),
            each.beside.num_lines / each.beside.seconds,
        )
        for each in rounds
    ]
    medians = [statistics.median(column) for column in zip(*rows, strict=True)]
    for name, row in [*((str(number), row) for number, row in enumerate(rows, start=1)), ("median", medians)]:
        count, *times, p50, p95, lines = row
        table.add_row(
            name,
            f"{count:.0f}",
            *(f"{value:.1f} ms" for value in times),
            f"{p50:.2f} x",
            f"{p95:.2f} x",
            f"{lines:.1f}",
        )
    return table


class Measurement:
    """Measures rounds at the endpoint of a running cluster."""

    def __init__(self, client: RouterClient, load: Load, model: str) -> None:
        self._client = client
        self._load = load
        self._model = model

    async def round(self, number: int) -> Round:
        """Measures both halves; the one beside a job is the first one in every other round."""
        if number % 2:
            beside = await self._beside(number)
            return Round(await self._half(number, "without"), beside)
        without = await self._half(number, "without")
        return Round(without, await self._beside(number))

    async def _beside(self, number: int) -> Half:
        content = await asyncio.to_thread(self._load.lines, number, self._model)
        file_id = await self._client.upload("lines.jsonl", io.BytesIO(content))
        batch = await self._client.create_batch(file_id, COMPLETION_PATH)
        while not _num_done(batch):
            await asyncio.sleep(_POLL_S)
            batch = await self._client.batch(batch["id"])
            if batch["status"] in _ENDED:
                raise SystemExit(f"The job is {batch['status']} before a line has run: {batch['errors']}")
        half = await self._half(number, "beside", batch["id"])
        batch = await self._client.batch(batch["id"])
        if batch["status"] in _ENDED:
            raise SystemExit("The job ended before its half of the round. Give it more lines (--lines).")
        batch = await self._client.cancel_batch(batch["id"])
        while batch["status"] not in _ENDED:
            await asyncio.sleep(_POLL_S)
            batch = await self._client.batch(batch["id"])
        return half

    async def _half(self, number: int, half: str, batch_id: str | None = None) -> Half:
        specs = self._load.requests(number, half)
        samples = [
            Sample(spec.at_s or 0.0, (spec.at_s or 0.0) < _WARM_UP_S, None, spec.output_tokens) for spec in specs
        ]
        done_before = await self._num_done(batch_id)
        began_s = time.perf_counter()
        endpoint = Endpoint(f"{self._client.endpoint}/v1", self._model, service_tier=INTERACTIVE.name)
        async with LoadClient(endpoint, _TIMEOUT_S) as client, asyncio.TaskGroup() as group:
            for spec, sample in zip(specs, samples, strict=True):
                await asyncio.sleep(max(0.0, began_s + sample.intended_s - time.perf_counter()))
                group.create_task(client.send(spec, sample, began_s))
        seconds = time.perf_counter() - began_s
        measured = [sample for sample in samples if not sample.is_warmup]
        return Half(
            [found for sample in measured if (found := sample.ttft_s(from_send=True)) is not None],
            sum(not sample.is_ok for sample in samples),
            await self._num_done(batch_id) - done_before,
            seconds,
        )

    async def _num_done(self, batch_id: str | None) -> int:
        return 0 if batch_id is None else _num_done(await self._client.batch(batch_id))


def _num_done(batch: dict[str, Any]) -> int:
    counts = batch["request_counts"]
    return int(counts["completed"] + counts["failed"])


async def measure(endpoint: str, load: Load, num_rounds: int) -> list[Round]:
    """Measures so many rounds, after one that warms the cluster up."""
    async with RouterClient(endpoint) as client:
        measurement = Measurement(client, load, await client.model())
        await measurement.round(-1)
        return [await measurement.round(number) for number in range(num_rounds)]


def command(
    rate: Annotated[float, typer.Option(min=0.1, max=1000, help="Interactive requests per second.")] = 10.0,
    seconds: Annotated[float, typer.Option(min=5, max=3600, help="Duration of each half of a round.")] = 15.0,
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Number of rounds.")] = 5,
    tokens: Annotated[int, typer.Option(min=1, max=1000, help="Tokens of each answer.")] = 32,
    words: Annotated[int, typer.Option(min=10, max=1000, help="Mean number of words of each prompt.")] = 100,
    line_tokens: Annotated[int, typer.Option(min=1, max=1000, help="Tokens of each answer of the job.")] = 100,
    lines: Annotated[int, typer.Option(min=100, max=50_000, help="Lines of each job.")] = 5000,
    in_flight: Annotated[int, typer.Option(min=1, help="jobs.max_in_flight.")] = 32,
    real: Annotated[bool, typer.Option("--real", help="Workers that compute the default model.")] = False,
) -> None:
    """Measure the time to the first token without and beside a running job."""
    load = Load(rate, seconds, tokens, words, line_tokens, lines)
    console = Console(width=120)
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {
            "router": {"port": 0},
            "ray": {"num_cpus": 8},
            "jobs": {"dir": folder, "max_in_flight": in_flight},
        }
        if not real:
            workers = {"prefill": {"workers": 2}, "decode": {"workers": 2}}
            settings |= {"simulation": {"profile": "h100-8b"}, **workers}
        cluster = Cluster.start(BatonConfig.from_dict(settings), lambda _: None)
        try:
            found = asyncio.run(measure(cluster.endpoint, load, rounds))
        finally:
            cluster.stop()
    console.print(show(found))
    console.print(
        f"{rate:g} requests/s for {seconds:g} s in each half; prompts of {words} words, answers of {tokens} tokens, "
        f"those of the job {line_tokens}; at most {in_flight} lines at the same time. The bar is {BAR:g} x for the "
        "median p95."
    )
    failed = sum(half.num_failed for each in found for half in (each.without, each.beside))
    if failed:
        console.print(f"{failed} requests failed.")
    raise typer.Exit(0 if is_met(found) else 1)


if __name__ == "__main__":
    sys.exit(run_command(command, "benchmarks.job_interference"))
