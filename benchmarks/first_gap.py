"""What a request notices of the hand-off: ``python -m benchmarks.first_gap [--help]``.

The first token comes from the prefill worker, the second one from the decode worker, which can only begin when it has
all of the prompt's KV. One cluster, one request at a time, every prompt a new one. What the hand-off adds is the gap
behind the first token less the median of those behind it, on the client's clock; it is compared with the time that
the prompt took to compute. Chunks without tokens are not counted, and drafts are off by default, since rounds of
different lengths would hide what is looked for.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shlex
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from baton.client.router_client import RouterClient
from baton.core.errors import BatonError, ConfigError
from benchmarks.side_by_side import Server, running

_DATA = "data: "
_TIMEOUT_S = 120.0
_VOCABULARY = range(1_000, 40_000)
"""Numbers of ordinary tokens in any vocabulary of today."""


@dataclass(frozen=True, slots=True)
class Run:
    """One request.

    Attributes:
        first_token_ms: from sending the request.
        prefill_ms: what its prompt took to compute, queueing aside, as its timeline has it.
        gaps_ms: between tokens that arrived one after the other.
    """

    first_token_ms: float
    prefill_ms: float
    gaps_ms: tuple[float, ...]

    @property
    def visible_ms(self) -> float:
        """Of the hand-off, in the first gap."""
        return self.gaps_ms[0] - median(self.gaps_ms[1:])

    @property
    def share(self) -> float:
        """That, of the prefill's own time."""
        return self.visible_ms / self.prefill_ms


def figures(runs: Sequence[Run]) -> dict[str, float]:
    """Medians over the runs."""
    return {
        "first_token_ms": median(run.first_token_ms for run in runs),
        "prefill_ms": median(run.prefill_ms for run in runs),
        "first_gap_ms": median(run.gaps_ms[0] for run in runs),
        "usual_gap_ms": median(median(run.gaps_ms[1:]) for run in runs),
        "visible_ms": median(run.visible_ms for run in runs),
        "visible_of_prefill": median(run.share for run in runs),
    }


async def measure(url: str, num_prompt_tokens: int, num_output_tokens: int, repeats: int) -> list[Run]:
    """Requests to a router that runs, the first one not counted.

    Raises:
        BatonError: one was refused, failed, or gave other tokens than were asked for.
    """
    runs = []
    async with RouterClient(url) as router, httpx.AsyncClient(timeout=_TIMEOUT_S, trust_env=False) as http:
        model = await router.model()
        for number in range(repeats + 1):
            rng = random.Random(f"{time.time_ns()} {number}")  # a prompt that was there before is not computed
            body = {
                "model": model,
                "prompt": rng.choices(_VOCABULARY, k=num_prompt_tokens),
                "max_tokens": num_output_tokens,
                "min_tokens": num_output_tokens,
                "ignore_eos": True,
                "temperature": 0,
                "stream": True,
            }
            run = await _request(router, http, f"{url}/v1/completions", body)
            if number:
                runs.append(run)
    return runs


async def _request(router: RouterClient, http: httpx.AsyncClient, url: str, body: dict[str, Any]) -> Run:
    arrivals: list[float] = []
    request_id = ""
    started_s = time.perf_counter()
    async with http.stream("POST", url, json=body) as response:
        if response.status_code != httpx.codes.OK:
            raise ConfigError(f"The router answered {response.status_code}: {(await response.aread()).decode()[:500]}")
        async for line in response.aiter_lines():
            arrived_s = time.perf_counter()
            if line.startswith(_DATA) and line != f"{_DATA}[DONE]":
                chunk = json.loads(line.removeprefix(_DATA))
                if "error" in chunk:
                    raise ConfigError(f"A request failed: {chunk['error']}")
                request_id = chunk["id"]
                if any(choice["finish_reason"] is None for choice in chunk["choices"]):
                    arrivals.append(arrived_s)
    if len(arrivals) < 3:
        raise ConfigError(f"The answer came in {len(arrivals)} parts, but there must be at least 3.")
    timeline = await router.timeline(request_id)
    [prefill_ms] = [span["duration_ms"] for span in timeline["spans"] if span["name"] == "prefill"]
    gaps_ms = tuple((after - before) * 1e3 for before, after in pairwise(arrivals))
    return Run((arrivals[0] - started_s) * 1e3, prefill_ms, gaps_ms)


def show(runs: Sequence[Run], num_prompt_tokens: int) -> Table:
    """The medians."""
    values = figures(runs)
    table = Table(title=f"prompts of {num_prompt_tokens} tokens, medians of {len(runs)} requests, one at a time")
    table.add_column("")
    table.add_column("ms", justify="right")
    for name, label in (
        ("first_token_ms", "first token"),
        ("prefill_ms", "of that, computing the prompt"),
        ("first_gap_ms", "first gap"),
        ("usual_gap_ms", "later gaps"),
        ("visible_ms", "what the hand-off adds to the first gap"),
    ):
        table.add_row(label, f"{values[name]:.1f}")
    shares = sorted(run.share for run in runs)
    table.add_row(
        "of the prefill's own time", f"{values['visible_of_prefill']:.1%} ({shares[0]:.1%} to {shares[-1]:.1%})"
    )
    return table


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2000, help="of each prompt")
    parser.add_argument("--output", type=int, default=24, help="tokens of each answer, at least 3")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--up", default="--set speculation.method=none", help="more options of `baton up`")
    parser.add_argument("--log", type=Path, default=Path("out/first_gap.log"), help="what the cluster prints")
    parser.add_argument("--json", type=Path, help="also write every run here")
    arguments = parser.parse_args()
    if arguments.output < 3 or arguments.repeats < 1 or arguments.tokens < 1:
        parser.error("--output must be at least 3, --repeats and --tokens at least 1.")
    arguments.log.parent.mkdir(parents=True, exist_ok=True)
    url = f"http://127.0.0.1:{_free_port()}"
    port = url.rpartition(":")[2]
    command = f"baton up --set router.host=127.0.0.1 --set router.port={port} {arguments.up}"
    try:
        shlex.split(command)
        with running(Server("baton", command, f"{url}/v1"), arguments.log):
            runs = asyncio.run(measure(url, arguments.tokens, arguments.output, arguments.repeats))
    except (BatonError, ValueError) as error:
        parser.exit(1, f"error: {error}\n")
    Console().print(show(runs, arguments.tokens))
    if arguments.json:
        document = {"format": "baton-first-gap", "runs": [asdict(run) for run in runs], "figures": figures(runs)}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
