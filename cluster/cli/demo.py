"""``make demo``: starts a cluster, streams one answer, sends a small batch, shows each request's costs, shuts down."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.control import Control
from rich.segment import ControlType
from rich.text import Text

from baton.client.router_client import CHAT_PATH, RouterClient
from baton.core.errors import BatonError
from baton.process.stop_signals import StopSignals
from cluster.cli.cli_submit import choice_text
from cluster.cli.cli_up import RunningCluster, start_cluster
from cluster.cli.demo_report import Measurement, cost_table
from cluster.config.config import BatonConfig, load_config

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
_DEGREES = ("prefill.tensor_parallel", "decode.tensor_parallel")
_EXPLANATION = (
    "accepted drafts: output tokens that came from speculation. TTFT: time to first token. TPOT: time per output "
    "token after the first. KV: size of the KV cache that gRPC handed over. The demo hands over every prompt unless "
    "your configuration sets routing.local_prefill; by default, a decode worker computes a prompt itself when that "
    "is faster. transfer: from the reservation until the KV has arrived; most of it overlaps with prefill."
)
_INTERRUPTED = 130
"""Exit status by the shells' convention: 128 plus the number of SIGINT."""
_TIMELINE_ATTEMPTS = 20
_TIMELINE_RETRY_S = 0.05


def main() -> None:
    """Entry point of ``python -m cluster.cli.demo``."""
    typer.run(demo)


def demo(
    config: Annotated[
        Path | None, typer.Option("-c", "--config", help="YAML configuration file. Default: the built-in defaults.")
    ] = None,
    tensor_parallel: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Processes among which each worker divides the model; on CPUs this shows that it works, not speed.",
        ),
    ] = None,
) -> None:
    """Show a disaggregated cluster serving real requests."""
    console = Console(highlight=False)
    try:
        with StopSignals(impatient=False):
            num_failed = _run(config, console, tensor_parallel)
    except KeyboardInterrupt as error:
        _print_status(console, "stopped")
        raise typer.Exit(_INTERRUPTED) from error
    except BatonError as error:
        console.print(Text(f"error: {error.message}", style="red"), soft_wrap=True)
        raise typer.Exit(1) from error
    if num_failed:
        console.print(Text(f"{num_failed} requests failed", style="red"))
        raise typer.Exit(1)


def _run(config: Path | None, console: Console, tensor_parallel: int | None) -> int:
    """Runs the whole demo and returns the number of failed requests."""
    settings = _settings(config, tensor_parallel)
    started_s = time.monotonic()
    cluster = start_cluster(settings, _Lines(console))
    try:
        _print_status(console, f"ready at {cluster.endpoint} after {time.monotonic() - started_s:.1f} s")
        return asyncio.run(_show_requests(cluster, console))
    finally:
        _print_status(console, "shutting down")
        cluster.stop()
        _print_status(console, "the cluster has shut down")


def _settings(config: Path | None, tensor_parallel: int | None) -> BatonConfig:
    """The configuration, with every prompt handed over unless the file sets ``routing.local_prefill``.

    Otherwise an idle cluster would compute short prompts on the decode worker, without a hand-off to show.
    """
    degree = {} if tensor_parallel is None else dict.fromkeys(_DEGREES, tensor_parallel)
    settings = load_config(config, {"router.port": 0, **degree})
    if "local_prefill" in settings.routing.model_fields_set:
        return settings
    return settings.model_copy(update={"routing": settings.routing.model_copy(update={"local_prefill": "never"})})


async def _show_requests(cluster: RunningCluster, console: Console) -> int:
    """Sends all requests, prints the table, and returns the number of failed requests."""
    async with RouterClient(cluster.endpoint) as client:
        model = await client.model()
        console.print(Text.assemble("\n", ("you: ", "bold"), _STREAMED_PROMPT, "\n", (f"{model}: ", "bold")), end="")
        try:
            streamed = await _outcome(client, model, "stream", _STREAMED_PROMPT, True)
        finally:
            console.print("\n")
        started_s = time.monotonic()
        batch = await _send_batch(client, model, console)
        batch_s = time.monotonic() - started_s
    console.print()
    console.print(cost_table(_answered([streamed, *batch]), console.width))
    console.print(f"\n{_EXPLANATION}\n")
    num_tokens = sum(measurement.output_tokens for measurement in _answered(batch))
    _print_status(console, f"the batch: {num_tokens} tokens in {batch_s:.1f} s, {num_tokens / batch_s:.1f} tokens/s")
    failures = [outcome for outcome in (streamed, *batch) if isinstance(outcome, BatonError)]
    for failure in failures:
        console.print(Text(f"failed: {failure.message}", style="red"), soft_wrap=True)
    return len(failures)


async def _send_batch(client: RouterClient, model: str, console: Console) -> list[Measurement | BatonError]:
    """Sends the batch, a few requests at a time, and shows the number of answers on a terminal."""
    names = [f"batch {number}" for number in range(1, len(_BATCH_PROMPTS) + 1)]
    _print_status(console, f"{len(names)} requests, {_BATCH_CONCURRENCY} at a time")
    turn = asyncio.Semaphore(_BATCH_CONCURRENCY)
    num_done = 0

    async def in_turn(name: str, prompt: str) -> Measurement | BatonError:
        nonlocal num_done
        async with turn:
            outcome = await _outcome(client, model, name, prompt, False)
        num_done += 1
        progress.update(f"{num_done} of {len(names)} done")
        return outcome

    with console.status(f"0 of {len(names)} done") as progress:  # prints nothing without a terminal
        return await asyncio.gather(*map(in_turn, names, _BATCH_PROMPTS))


def _answered(outcomes: Sequence[Measurement | BatonError]) -> list[Measurement]:
    return [outcome for outcome in outcomes if isinstance(outcome, Measurement)]


async def _outcome(client: RouterClient, model: str, name: str, prompt: str, show: bool) -> Measurement | BatonError:
    try:
        return await _measure(client, model, name, prompt, show)
    except BatonError as error:
        return error


async def _measure(client: RouterClient, model: str, name: str, prompt: str, show: bool) -> Measurement:
    """Sends one streamed chat and measures it at the client."""
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
        drafted_tokens=int((usage.get("completion_tokens_details") or {}).get("accepted_prediction_tokens") or 0),
        ttft_ms=(first_s - started_s) * 1e3,
        tpot_ms=(ended_s - first_s) * 1e3 / (output_tokens - 1) if output_tokens > 1 else None,
        total_ms=(ended_s - started_s) * 1e3,
        prefill_ms=spans.get("prefill"),
        transfer_ms=spans.get("transfer"),
        kv_bytes=timeline["attributes"].get("kv_bytes"),
    )


async def _finished_timeline(client: RouterClient, request_id: str) -> dict[str, Any]:
    """A request's finished timeline. The router closes it just after the last chunk, so this may have to retry."""
    for _ in range(_TIMELINE_ATTEMPTS):
        timeline = await client.timeline(request_id)
        if any(span["name"] == "total" for span in timeline["spans"]):
            break
        await asyncio.sleep(_TIMELINE_RETRY_S)
    return timeline


class _Lines:
    """Prints lines; on a terminal, a progress bar replaces the one before it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last = ""

    def __call__(self, line: str) -> None:
        name, bar, _ = line.partition(" [")
        if bar and self._last.startswith(name + bar) and self._console.is_terminal:
            self._console.control(Control((ControlType.CURSOR_UP, 1), (ControlType.ERASE_IN_LINE, 2)))
        _print_status(self._console, line)
        self._last = line


def _print_status(console: Console, line: str) -> None:
    console.print(Text.assemble(("• ", "cyan"), line), soft_wrap=True)


if __name__ == "__main__":
    main()
