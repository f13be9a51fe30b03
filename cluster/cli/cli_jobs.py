"""Batches on the command line: ``baton submit --file``, and ``baton jobs`` to return to them."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from baton.client.router_client import RouterClient, RouterUnreachableError
from baton.core.errors import ConfigError
from cluster.cli.cli_common import CaOption, EndpointOption, JsonOption, with_client
from cluster.cli.cli_reporter import error_console, print_report

ENDED = ("completed", "failed", "expired", "cancelled")
_POLL_S = 0.5
_UNREACHABLE_S = 120.0
"""How long a command waits for a router that does not answer, such as one that is being replaced."""

app = typer.Typer(help="Return to batches: see docs/jobs.md.", no_args_is_help=True)
JobArgument = Annotated[str, typer.Argument(metavar="BATCH", help="Id of the batch, as `baton jobs list` shows it.")]


@app.command("list")
def list_jobs(
    limit: Annotated[int, typer.Option(min=1, max=100, help="Number of batches, the newest first.")] = 20,
    as_json: JsonOption = False,
    endpoint: EndpointOption = None,
    ca: CaOption = None,
) -> None:
    """List your batches."""
    found = with_client(endpoint, ca, lambda client: client.batches(limit))
    if as_json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
        return
    table = Table(box=None, pad_edge=False)
    for name in ("batch", "state", "answered", "failed", "of", "created"):
        table.add_column(name, justify="right" if name in ("answered", "failed", "of") else "left")
    for batch in found:
        counts = batch["request_counts"]
        numbers = (str(counts[key]) for key in ("completed", "failed", "total"))
        table.add_row(batch["id"], batch["status"], *numbers, _time(batch["created_at"]))
    print_report(table if found else Text("There are no batches. Make one with `baton submit --file`."))


@app.command("show")
def show_job(
    job: JobArgument, as_json: JsonOption = False, endpoint: EndpointOption = None, ca: CaOption = None
) -> None:
    """Show one batch."""
    batch = with_client(endpoint, ca, lambda client: client.batch(job))
    if as_json:
        sys.stdout.write(json.dumps(batch, indent=2) + "\n")
        return
    lines = [_summary(batch), *_problems(batch)]
    lines += [
        f"{key.removesuffix('_at').replace('_', ' ')}: {_time(value)}"
        for key, value in batch.items()
        if key.endswith("_at") and value
    ]
    if batch["status"] in ENDED and (batch["output_file_id"] or batch["error_file_id"]):
        lines.append(f"Get the answers with `baton jobs fetch {batch['id']}`.")
    print_report(Text("\n".join(lines)))


@app.command("cancel")
def cancel_job(job: JobArgument, endpoint: EndpointOption = None, ca: CaOption = None) -> None:
    """End a batch. What is done is kept."""
    error_console().print(Text(_summary(with_client(endpoint, ca, lambda client: client.cancel_batch(job)))))


@app.command("fetch")
def fetch_job(
    job: JobArgument,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="JSONL file. Default: standard output.")] = None,
    endpoint: EndpointOption = None,
    ca: CaOption = None,
) -> None:
    """Write the answers of a batch that has ended, in the order of the prompts."""

    async def fetch(client: RouterClient) -> None:
        batch = await client.batch(job)
        if batch["status"] not in ENDED:
            raise ConfigError(f"{_summary(batch)} Its answers can be fetched when it has ended; cancel ends it early.")
        if batch["status"] != "completed":
            error_console().print(Text("\n".join([_summary(batch), *_problems(batch)])))
        await _fetch(client, batch, output)

    with_client(endpoint, ca, fetch)


def submit_job(
    endpoint: str | None,
    ca: Path | None,
    source: Path,
    output: Path | None,
    options: Mapping[str, Any],
    *,
    chat: bool,
    detach: bool,
) -> None:
    """Makes a batch of a file of prompts, and follows it to its end unless ``detach`` is set.

    Raises:
        ConfigError: a file cannot be read or written, or has faulty lines.
        BatonError: the router refuses the batch, or cannot be reached.
        typer.Exit: prompts have failed.
    """
    from cluster.cli.job_files import PromptFile

    if output is not None:
        _check_target(output, source)
    made: list[str] = []

    async def run(client: RouterClient) -> Mapping[str, Any]:
        prompts = PromptFile(await client.model(), options, chat)
        with tempfile.TemporaryFile() as lines:
            prompts.write(source, lines)
            lines.seek(0)
            file_id = await client.upload(source.name, lines)
        batch = await client.create_batch(file_id, prompts.endpoint)
        made.append(batch["id"])
        if detach:
            return batch
        batch = await _follow(client, batch)
        if output is not None:
            await _fetch(client, batch, output)
        return batch

    try:
        batch = with_client(endpoint, ca, run)
    except KeyboardInterrupt:
        if made:
            error_console().print(Text(f"\nThe batch goes on. Return to it with `baton jobs show {made[0]}`."))
        raise
    if detach or output is None:
        sys.stdout.write(f"{batch['id']}\n")
    if not detach:
        error_console().print(Text("\n".join([_summary(batch), *_problems(batch)])))
        if batch["status"] != "completed" or batch["request_counts"]["failed"]:
            raise typer.Exit(1)


async def _follow(client: RouterClient, batch: dict[str, Any]) -> dict[str, Any]:
    """Shows the progress of a batch until it has ended."""
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TimeRemainingColumn(), console=error_console(),
    )  # fmt: skip
    with bar:
        task = bar.add_task(batch["id"], total=None)
        answered_s = time.monotonic()
        while batch["status"] not in ENDED:
            await asyncio.sleep(_POLL_S)
            try:
                batch = await client.batch(batch["id"])
            except RouterUnreachableError:
                if time.monotonic() - answered_s > _UNREACHABLE_S:
                    raise
                continue
            answered_s, counts = time.monotonic(), batch["request_counts"]
            bar.update(task, completed=counts["completed"] + counts["failed"], total=counts["total"] or None)
    return batch


async def _fetch(client: RouterClient, batch: Mapping[str, Any], target: Path | None) -> None:
    """Writes the answers to a file, or to standard output."""
    from cluster.cli.job_files import answers, to_json_line

    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        for file_id, stream in ((batch["output_file_id"], output), (batch["error_file_id"], errors)):
            if file_id is not None:
                await client.download(file_id, stream)
            stream.seek(0)
        texts = map(to_json_line, answers(output, errors))
        if target is None:
            sys.stdout.writelines(texts)
            return
        try:
            with target.open("w", encoding="utf-8") as written:
                written.writelines(texts)
        except OSError as error:
            raise ConfigError(
                f"Cannot write {target}: {error}. The answers are kept; try `baton jobs fetch {batch['id']} -o FILE`."
            ) from error


def _check_target(target: Path, source: Path) -> None:
    """Raises :class:`ConfigError` before anything is sent if the answers could not be written."""
    if target.exists() and target.samefile(source):
        raise ConfigError(f"{target} is the input file; choose another output file.")
    try:
        with target.open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise ConfigError(f"Cannot write {target}: {error}.") from error


def _summary(batch: Mapping[str, Any]) -> str:
    counts = batch["request_counts"]
    numbers = f"{counts['completed']} answered, {counts['failed']} failed, of {counts['total']}"
    return f"{batch['id']}: {batch['status']}, {numbers}."


def _problems(batch: Mapping[str, Any]) -> list[str]:
    found = (batch.get("errors") or {}).get("data", ())
    return [f"line {one['line']}: {one['message']}" if one.get("line") else one["message"] for one in found]


def _time(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")
