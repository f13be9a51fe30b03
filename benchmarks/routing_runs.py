"""What routing decides and brings on a real cluster: ``python -m benchmarks.routing_runs [--help]``.

For each size of the pools and each way of routing it starts a cluster, puts the same load on it with `baton bench
serve`, and reads from ``/metrics`` what the router decided: pairs or local prefill, prompt tokens found in caches,
refusals. Gains are ratios to round-robin. The machine should do nothing else.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from baton.bench.document import check_writable
from baton.bench.option_text import known_name
from baton.core.errors import ConfigError, InternalError
from benchmarks.router_load.entry import parse_sizes
from cluster.config.config import load_config
from cluster.controller.launch import Cluster
from cluster.simulation.entry import ROUTERS as SIMULATED_ROUTERS

_TIMEOUT_S = 900.0
_NUM_DOCUMENTS = 6
_DOCUMENT_LINES = 5
_ROUND_ROBIN = "round-robin"
_NUM_WARMUP = 3

ROUTERS: Mapping[str, Mapping[str, Any]] = {
    "baton": {},
    "no prefix affinity": {"routing.scorers.prefix_affinity": 0},
    "hand-off always": {"routing.local_prefill": "never"},
    _ROUND_ROBIN: SIMULATED_ROUTERS["round_robin"],
}
WORKLOADS = ("prefix-heavy", "mixed")


@dataclass(frozen=True, slots=True)
class Run:
    """One cluster and one load.

    Attributes:
        pools: (prefill, decode) workers.
    """

    pools: tuple[int, int]
    router: str
    workload: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """Medians over the repetitions; milliseconds, tokens per second, shares of 1.

    Attributes:
        pairs, local, refused: sequences by what the router did with them, warm-up included.
        failed: measured requests without an answer.
        cached_share: of their prompt tokens, in a prefix cache of the worker that computed them.
    """

    ttft_ms: float
    tpot_ms: float
    itl_p99_ms: float
    tokens_per_s: float
    pairs: float
    local: float
    refused: float
    cached_share: float
    failed: float


def prefix_heavy_prompts(count: int, seed: int) -> list[str]:
    """Questions about one of a few long documents, in random order."""
    file = resources.files("benchmarks") / "speculation_prompts" / "summarise.jsonl"
    lines = [json.loads(line)["prompt"] for line in file.read_text("utf-8").splitlines() if line.strip()]
    generator = random.Random(seed)
    documents = [
        f"Document {number}.\n" + "\n".join(generator.sample(lines, min(_DOCUMENT_LINES, len(lines))))
        for number in range(_NUM_DOCUMENTS)
    ]
    return [
        f"{generator.choice(documents)}\n\nQuestion {generator.randrange(10**6)}: what is it about?"
        for _ in range(count)
    ]


def load_options(workload: str, count: int, folder: Path) -> list[str]:
    """Options of `baton bench serve` for a workload."""
    if workload == "mixed":
        lengths = ["--input", "lognormal:median=200,p95=1000", "--output", "lognormal:median=32,p95=86"]
        return [*lengths, "--max-input", "1200", "--max-output", "96"]
    file = folder / "prompts.jsonl"
    prompts = prefix_heavy_prompts(count, seed=1)
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts), encoding="utf-8")
    return ["--prompts", str(file), "--output", "32"]


def counter(metrics: str, name: str, labels: str = "") -> float:
    """Sum of a counter's series whose labels hold some text."""
    pattern = re.compile(rf"^{re.escape(name)}(?:\{{([^}}]*)\}})? (\S+)$", re.MULTILINE)
    return sum(float(value) for found, value in pattern.findall(metrics) if labels in found)


@contextmanager
def running(run: Run) -> Iterator[str]:
    """A cluster's endpoint, for as long as the block runs."""
    prefill, decode = run.pools
    sizes = {"router.port": 0, "prefill.workers": prefill, "decode.workers": decode}
    cluster = Cluster.start(load_config(None, {**sizes, **ROUTERS[run.router]}), lambda _: None)
    try:
        yield cluster.endpoint
    finally:
        cluster.stop()


def measure(run: Run, count: int, concurrency: int) -> Outcome:
    """Raises :class:`InternalError` when the load tool fails, with what it said."""
    with tempfile.TemporaryDirectory() as name, running(run) as endpoint:
        folder = Path(name)
        report = folder / "report.json"
        command = [
            str(Path(sys.executable).with_name("baton")), "bench", "serve", "--url", endpoint, "--requests", str(count),
            "--concurrency", str(concurrency), "--warmup-requests", str(_NUM_WARMUP), "--json", str(report),
            *load_options(run.workload, count + _NUM_WARMUP, folder),
        ]  # fmt: skip
        load = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_TIMEOUT_S)
        if load.returncode:
            raise InternalError(f"`{' '.join(command[:3])}` ended with {load.returncode}: {load.stderr[-1000:]}")
        (stage,) = json.loads(report.read_text("utf-8"))["stages"]
        metrics = httpx.get(f"{endpoint}/metrics", timeout=30.0).text
    return read_outcome(stage, metrics)


def read_outcome(stage: Mapping[str, Any], metrics: str) -> Outcome:
    """From a stage of the load tool's report and the router's page of metrics."""
    prompt_tokens = counter(metrics, "baton_prompt_tokens_total")
    return Outcome(
        ttft_ms=stage["latencies"]["ttft_ms"]["p50"],
        tpot_ms=stage["latencies"]["tpot_ms"]["p50"],
        itl_p99_ms=stage["latencies"]["itl_ms"]["p99"],
        tokens_per_s=stage["throughput"]["output_tokens_per_s"],
        pairs=counter(metrics, "baton_routes_total", 'kind="pair"'),
        local=counter(metrics, "baton_routes_total", 'kind="local"'),
        refused=counter(metrics, "baton_admission_refusals_total"),
        cached_share=counter(metrics, "baton_cached_prompt_tokens_total") / max(1.0, prompt_tokens),
        failed=stage["num_failed"],
    )


def median_of(outcomes: Sequence[Outcome]) -> Outcome:
    names = Outcome.__slots__
    return Outcome(**{name: statistics.median(getattr(one, name) for one in outcomes) for name in names})


def render(found: Mapping[Run, Outcome]) -> Table:
    """A row for each run: what the router decided, the latencies, and what it gained against round-robin."""
    table = Table()
    for column in ("workers", "workload", "router"):
        table.add_column(column, no_wrap=True)
    for column in ("pairs", "local", "refused", "failed", "cached", "TTFT p50 ms", "TPOT p50 ms", "ITL p99 ms",
                   "tokens/s", "TTFT, × less", "tokens/s, × more"):  # fmt: skip
        table.add_column(column, justify="right")
    for run, outcome in found.items():
        yardstick = found.get(replace(run, router=_ROUND_ROBIN), outcome)
        table.add_row(
            "+".join(map(str, run.pools)), run.workload, run.router,
            f"{outcome.pairs:g}", f"{outcome.local:g}", f"{outcome.refused:g}", f"{outcome.failed:g}",
            f"{outcome.cached_share:.0%}",
            f"{outcome.ttft_ms:.0f}", f"{outcome.tpot_ms:.1f}", f"{outcome.itl_p99_ms:.0f}",
            f"{outcome.tokens_per_s:.1f}", _ratio(yardstick.ttft_ms, outcome.ttft_ms),
            _ratio(outcome.tokens_per_s, yardstick.tokens_per_s),
        )  # fmt: skip
    return table


def _ratio(more: float, less: float) -> str:
    return f"{more / less:.2f}" if less else "-"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pools", default="1+1,2+2", help="prefill+decode workers, several with commas between")
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--routers", default=",".join(ROUTERS))
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=1, help="rounds over all of it; medians are shown")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args(arguments)
    try:
        pools = parse_sizes("--pools", chosen.pools)
        workloads = [known_name("--workloads", name.strip(), WORKLOADS) for name in chosen.workloads.split(",")]
        routers = [known_name("--routers", name.strip(), ROUTERS) for name in chosen.routers.split(",")]
        if chosen.json is not None:
            check_writable("--json", chosen.json)
    except ConfigError as error:
        parser.error(str(error))
    if min(chosen.requests, chosen.concurrency, chosen.repeat) < 1:
        parser.error("--requests, --concurrency and --repeat must be at least 1")
    runs = [Run(one, router, work) for one in pools for work in workloads for router in routers]
    found: dict[Run, list[Outcome]] = {run: [] for run in runs}
    console = Console(width=max(140, Console().width))
    for _ in range(chosen.repeat):
        for run in runs:
            found[run].append(measure(run, chosen.requests, chosen.concurrency))
            last = found[run][-1]
            where = f"{'+'.join(map(str, run.pools))} {run.workload}, {run.router}"
            console.print(f"{where}: TTFT {last.ttft_ms:.0f} ms, {last.tokens_per_s:.1f} tokens/s")
    console.print(render({run: median_of(outcomes) for run, outcomes in found.items()}))
    if chosen.json is not None:
        rows = [{"pools": run.pools, "router": run.router, "workload": run.workload,
                 "outcomes": [{name: getattr(one, name) for name in Outcome.__slots__} for one in outcomes]}
                for run, outcomes in found.items()]  # fmt: skip
        chosen.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
