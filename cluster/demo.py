"""``make demo``: start a cluster, stream one answer, send a small batch, show what each request cost, shut down."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cluster.cli_submit import choice_text
from cluster.cli_up import RunningCluster, start_cluster
from cluster.client import CHAT_PATH, RouterClient
from cluster.config import load_config
from engine.errors import BatonError
from engine.model_source import resolve_model

_STREAMED_PROMPT = "Explain in three sentences why the sky is blue."
_BATCH_CONCURRENCY = 4
_BATCH_PROMPTS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Name three uses of a paper clip.",
    "Translate to French: Good morning, how are you?",
    "Give me a recipe for pancakes, with the steps as a numbered list.",
    "What is the difference between a list and a tuple in Python?",
    "Summarize in one sentence: "
    + "A relay race is run by teams whose members pass a baton from hand to hand, each running one leg. " * 12,
    "Continue this story in two sentences: "
    + "The old lighthouse keeper climbed the stairs every evening, lit the lamp, and waited for the ships. " * 24,
)
_MAX_TOKENS = 64
_TIMELINE_ATTEMPTS = 20
_TIMELINE_RETRY_S = 0.05


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one request cost. Times in milliseconds; ttft and tpot as the client saw them.

    Attributes:
        tpot_ms: mean time per output token after the first; None when there was no second.
        kv_bytes, transfer_ms, queue_ms, prefill_ms: from the router's timeline; None where it does not say.
    """

    name: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft_ms: float
    tpot_ms: float | None
    total_ms: float
    queue_ms: float | None
    prefill_ms: float | None
    transfer_ms: float | None
    kv_bytes: int | None


def main() -> None:
    """Entry point of ``python -m cluster.demo``."""
    typer.run(demo)


def demo(
    config: Annotated[Path | None, typer.Option("-c", "--config", help="YAML file; the defaults without it.")] = None,
) -> None:
    """Show a disaggregated cluster at work on real requests."""
    console = Console()
    try:
        settings = load_config(config, {"router.port": 0})
        resolve_model(settings.model, lambda line: _say(console, line))
        started_s = time.monotonic()
        cluster = start_cluster(settings, lambda line: _say(console, line))
        try:
            _say(console, f"ready at {cluster.endpoint} after {time.monotonic() - started_s:.1f} s")
            num_failed = asyncio.run(_show_requests(cluster, console))
        finally:
            _say(console, "shutting down")
            cluster.stop()
        _say(console, "the cluster has shut down")
    except BatonError as error:
        console.print(Text(f"error: {error.message}", style="red"), soft_wrap=True)
        raise typer.Exit(1) from error
    if num_failed:
        console.print(Text(f"{num_failed} requests failed", style="red"))
        raise typer.Exit(1)


async def _show_requests(cluster: RunningCluster, console: Console) -> int:
    """Sends everything and prints the table; gives the number of failed requests."""
    async with RouterClient(cluster.endpoint) as client:
        model = await client.model()
        console.print(Text.assemble("\n", ("you: ", "bold"), _STREAMED_PROMPT, "\n", (f"{model}: ", "bold")), end="")
        outcomes: list[Measurement | BatonError] = [await _outcome(client, model, "stream", _STREAMED_PROMPT, True)]
        console.print("\n")
        batch = [f"batch {number}" for number in range(1, len(_BATCH_PROMPTS) + 1)]
        _say(console, f"{len(batch)} requests, {_BATCH_CONCURRENCY} at a time")
        turn = asyncio.Semaphore(_BATCH_CONCURRENCY)
        started_s = time.monotonic()

        async def in_turn(name: str, prompt: str) -> Measurement | BatonError:
            async with turn:
                return await _outcome(client, model, name, prompt, False)

        batch_outcomes = await asyncio.gather(*map(in_turn, batch, _BATCH_PROMPTS))
        batch_s = time.monotonic() - started_s
    outcomes += batch_outcomes
    console.print(_table([outcome for outcome in outcomes if isinstance(outcome, Measurement)]))
    answered = [outcome for outcome in batch_outcomes if isinstance(outcome, Measurement)]
    batch_tokens = sum(measurement.output_tokens for measurement in answered)
    _say(console, f"the batch: {batch_tokens} tokens in {batch_s:.1f} s, {batch_tokens / batch_s:.1f} tokens/s")
    failures = [outcome for outcome in outcomes if isinstance(outcome, BatonError)]
    for failure in failures:
        console.print(Text(f"failed: {failure.message}", style="red"), soft_wrap=True)
    return len(failures)


async def _outcome(client: RouterClient, model: str, name: str, prompt: str, show: bool) -> Measurement | BatonError:
    try:
        return await _measure(client, model, name, prompt, show)
    except BatonError as error:
        return error


async def _measure(client: RouterClient, model: str, name: str, prompt: str, show: bool) -> Measurement:
    """One streamed chat, timed at the client."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": _MAX_TOKENS,
        "temperature": 0,
        "stream_options": {"include_usage": True},
    }
    started_s = time.perf_counter()
    first_s: float | None = None
    usage: Mapping[str, Any] = {}
    request_id = ""
    async for chunk in client.stream(CHAT_PATH, body):
        request_id = chunk["id"]
        usage = chunk.get("usage") or usage
        for piece in map(choice_text, chunk["choices"]):
            if piece and first_s is None:
                first_s = time.perf_counter()
            if piece and show:
                sys.stdout.write(piece)
                sys.stdout.flush()
    ended_s = time.perf_counter()
    timeline = await _finished_timeline(client, request_id)
    spans = {span["name"]: float(span["duration_ms"]) for span in timeline["spans"]}
    output_tokens = int(usage["completion_tokens"])
    first_s = ended_s if first_s is None else first_s
    return Measurement(
        name=name,
        prompt_tokens=int(usage["prompt_tokens"]),
        cached_tokens=int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0),
        output_tokens=output_tokens,
        ttft_ms=(first_s - started_s) * 1e3,
        tpot_ms=(ended_s - first_s) * 1e3 / (output_tokens - 1) if output_tokens > 1 else None,
        total_ms=(ended_s - started_s) * 1e3,
        queue_ms=spans.get("queue"),
        prefill_ms=spans.get("prefill"),
        transfer_ms=spans.get("transfer"),
        kv_bytes=timeline["attributes"].get("kv_bytes"),
    )


async def _finished_timeline(client: RouterClient, request_id: str) -> dict[str, Any]:
    """The router closes a timeline just after it sent the last chunk, so the client may ask a moment too early."""
    for _ in range(_TIMELINE_ATTEMPTS):
        timeline = await client.timeline(request_id)
        if any(span["name"] == "total" for span in timeline["spans"]):
            break
        await asyncio.sleep(_TIMELINE_RETRY_S)
    return timeline


def _table(measurements: Sequence[Measurement]) -> Table:
    columns = "request,prompt,cached,output,TTFT ms,TPOT ms,tokens/s,queue ms,prefill ms,KV bytes,transfer ms"
    table = Table(*columns.split(","), title="What each request cost", title_justify="left", show_footer=True)
    for column in table.columns[1:]:
        column.justify = "right"
    for measurement in measurements:
        table.add_row(*_row(measurement))
    if measurements:
        for column, total in zip(table.columns, _totals(measurements), strict=True):
            column.footer = total
    return table


def _row(measurement: Measurement) -> list[str]:
    return [
        measurement.name,
        str(measurement.prompt_tokens),
        str(measurement.cached_tokens),
        str(measurement.output_tokens),
        _shown(measurement.ttft_ms),
        _shown(measurement.tpot_ms),
        _shown(measurement.output_tokens / measurement.total_ms * 1e3),
        _shown(measurement.queue_ms),
        _shown(measurement.prefill_ms),
        "-" if measurement.kv_bytes is None else f"{measurement.kv_bytes:,}",
        _shown(measurement.transfer_ms),
    ]


def _totals(measurements: Sequence[Measurement]) -> list[str]:
    """Sums of counts, means of times."""

    def mean(name: str) -> str:
        values = [value for value in (getattr(one, name) for one in measurements) if value is not None]
        return f"mean {sum(values) / len(values):.1f}" if values else "-"

    return [
        "total",
        str(sum(one.prompt_tokens for one in measurements)),
        str(sum(one.cached_tokens for one in measurements)),
        str(sum(one.output_tokens for one in measurements)),
        mean("ttft_ms"),
        mean("tpot_ms"),
        "",
        mean("queue_ms"),
        mean("prefill_ms"),
        f"{sum(one.kv_bytes or 0 for one in measurements):,}",
        mean("transfer_ms"),
    ]


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _say(console: Console, line: str) -> None:
    console.print(Text.assemble(("• ", "cyan"), line), soft_wrap=True)


if __name__ == "__main__":
    main()
