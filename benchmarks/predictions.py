"""How far the router's predictions are from what happens: ``python -m benchmarks.predictions [--help]``.

Starts a cluster, unless one is named, and keeps a few requests in flight. Of each it compares TTFT and TPOT with what
the router had predicted when it routed the request. The machine should do nothing else.

How evenly the machine ran bounds what can be predicted. So beside each error stands what one would have missed by in
hindsight, with the measured times of the other requests at hand: the median TTFT of those with prompts of nearly the
same length, and the median TPOT of those that were sent just before and after.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from baton.bench.latency import percentile
from benchmarks.speculation_workloads import WORKLOADS
from cluster.config.config import BatonConfig, load_config
from cluster.config.config_reading import parse_override
from cluster.controller.launch import Cluster

_TIMEOUT_S = 300.0
_NUM_NEIGHBOURS = 10


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request: milliseconds predicted and measured; TPOT is None for answers of one token."""

    prompt_tokens: int
    output_tokens: int
    ttft_ms: float
    predicted_ttft_ms: float
    tpot_ms: float | None
    predicted_tpot_ms: float


def make_prompts(count: int, seed: int) -> list[str]:
    """Texts of the speculation benchmark, one to six of them together; no two begin alike."""
    files = resources.files("benchmarks") / "speculation_prompts"
    lines = [line for name in WORKLOADS for line in (files / f"{name}.jsonl").read_text("utf-8").splitlines()]
    texts = [json.loads(line)["prompt"] for line in lines if line.strip()]
    generator = random.Random(seed)
    return [
        f"{generator.randrange(10**6)}. " + "\n\n".join(generator.sample(texts, generator.choice((1, 1, 2, 3, 6))))
        for _ in range(count)
    ]


async def measure(endpoint: str, prompts: Sequence[str], concurrency: int, seed: int) -> list[Outcome]:
    """Outcomes in the order in which the requests were sent."""
    generator = random.Random(seed)
    lengths = [generator.randint(16, 64) for _ in prompts]
    waiting = iter(range(len(prompts)))
    outcomes: dict[int, Outcome] = {}
    async with httpx.AsyncClient(base_url=endpoint, timeout=_TIMEOUT_S) as client:
        model = (await client.get("/v1/models")).raise_for_status().json()["data"][0]["id"]

        async def work() -> None:
            for index in waiting:
                body = {
                    "model": model,
                    "messages": [{"role": "user", "content": prompts[index]}],
                    "max_tokens": lengths[index],
                    "seed": index,
                }
                answer = (await client.post("/v1/chat/completions", json=body)).raise_for_status().json()
                found = await client.get(f"/v1/requests/{answer['id']}/timeline")
                outcomes[index] = outcome_of(found.raise_for_status().json())

        await asyncio.gather(*(work() for _ in range(concurrency)))
    return [outcomes[index] for index in sorted(outcomes)]


def outcome_of(timeline: dict[str, Any]) -> Outcome:
    """From a timeline as the router shows it."""
    timeline = (timeline.get("sequences") or [timeline])[0]
    at_ms = {event["name"]: event["at_ms"] for event in timeline["events"]}
    attributes = timeline["attributes"]
    count = attributes["output_tokens"]
    return Outcome(
        attributes["prompt_tokens"],
        count,
        at_ms["first_token"],
        attributes["predicted_ttft_ms"],
        (at_ms["finished"] - at_ms["first_token"]) / (count - 1) if count > 1 else None,
        attributes["predicted_tpot_ms"],
    )


def errors_of(outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
    """Signed relative errors, for TTFT and TPOT."""
    return {
        "TTFT": [outcome.predicted_ttft_ms / outcome.ttft_ms - 1 for outcome in outcomes],
        "TPOT": [outcome.predicted_tpot_ms / outcome.tpot_ms - 1 for outcome in outcomes if outcome.tpot_ms],
    }


def hindsight_errors_of(outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
    """What the other requests' times would have missed by, alike in length (TTFT) or in when they were sent (TPOT)."""
    first = [(float(outcome.prompt_tokens), outcome.ttft_ms) for outcome in outcomes]
    later = [(float(index), outcome.tpot_ms) for index, outcome in enumerate(outcomes) if outcome.tpot_ms]
    return {"TTFT": _errors_of_neighbours(first), "TPOT": _errors_of_neighbours(later)}


def _errors_of_neighbours(points: Sequence[tuple[float, float]]) -> list[float]:
    """Signed relative errors of the median over the points that lie nearest, the point itself left out."""
    errors = []
    for index, (place, value) in enumerate(points):
        others = sorted((abs(other - place), found) for i, (other, found) in enumerate(points) if i != index)
        if others:
            errors.append(statistics.median(found for _, found in others[:_NUM_NEIGHBOURS]) / value - 1)
    return errors


def render(outcomes: Sequence[Outcome], warm_up: int) -> Table:
    """Median and 95th percentile of the absolute errors, the median of the signed ones, and the first in hindsight."""
    table = Table("requests", "of", "median |error|", "p95 |error|", "median error", "in hindsight", "measured, median")
    for name, part in ((f"first {warm_up}", outcomes[:warm_up]), (f"after {warm_up}", outcomes[warm_up:])):
        measured = {
            "TTFT": [outcome.ttft_ms for outcome in part],
            "TPOT": [outcome.tpot_ms for outcome in part if outcome.tpot_ms],
        }
        hindsight = hindsight_errors_of(part)
        for kind, errors in errors_of(part).items():
            if errors:
                sizes = list(map(abs, errors))
                worst = percentile(sizes, 95)
                middle, bias = statistics.median(sizes), statistics.median(errors)
                usual = f"{statistics.median(measured[kind]):.1f} ms"
                best = f"{statistics.median(map(abs, hindsight[kind])):.1%}" if hindsight[kind] else "-"
                table.add_row(name, kind, f"{middle:.1%}", f"{worst:.1%}", f"{bias:+.1%}", best, usual)
    return table


@contextmanager
def _endpoint(url: str | None, config: BatonConfig, console: Console) -> Iterator[str]:
    if url is not None:
        yield url.rstrip("/").removesuffix("/v1")
        return
    cluster = Cluster.start(config, console.print)
    try:
        yield cluster.endpoint
    finally:
        cluster.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="of a running cluster; default: one is started")
    parser.add_argument("-c", "--config", type=Path, help="of the cluster that is started")
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], dest="overrides")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--warm-up", type=int, default=100, help="requests before those that count")
    parser.add_argument("--concurrency", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="every request, for a closer look")
    arguments = parser.parse_args()
    console = Console()
    overrides = {"router.port": 0, **dict(parse_override(text) for text in arguments.overrides)}
    with _endpoint(arguments.url, load_config(arguments.config, overrides), console) as endpoint:
        prompts = make_prompts(arguments.requests, arguments.seed)
        outcomes = asyncio.run(measure(endpoint, prompts, arguments.concurrency, arguments.seed))
    console.print(render(outcomes, arguments.warm_up))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes]), encoding="utf-8")


if __name__ == "__main__":
    main()
