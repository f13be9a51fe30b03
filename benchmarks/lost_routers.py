"""Several routers of which one is killed again and again: ``python -m benchmarks.lost_routers [--help]``.

Runs a cluster of simulated workers on this machine: with one router, with several, and with several of which one is
killed at a time. Requests come at random (Poisson). A stream that breaks is sent again, as a client would.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Annotated, Any

import aiohttp
import psutil
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from baton.bench.client import CONNECT_ERROR, DISCONNECTED_ERROR, TRUNCATED_ERROR, LoadClient
from baton.bench.endpoint import Endpoint, RequestSpec
from baton.bench.sample import Sample
from baton.core.roles import DECODE
from benchmarks.options import run_command
from cluster.config.config import BatonConfig
from cluster.controller.launch import Cluster

_BROKEN = (CONNECT_ERROR, DISCONNECTED_ERROR, TRUNCATED_ERROR)
_TIMEOUT_S = 60.0
_POLL_S = 0.5
_WARM_UP_S = 5.0
_DECODE_SEQS = 16
_TRIES = 3
_PAUSE_S = 0.2


@dataclass
class Outcome:
    """What one cluster did under the load.

    Attributes:
        samples: of all requests after the warm-up; those of broken streams are the last ones.
        num_broken: streams that broke and were sent again.
        num_open_at_kills: requests that the killed routers had in progress.
        most_sequences: largest number of sequences on a decode worker, running and waiting.
        most_blocks: largest share of a decode worker's KV blocks in use.
    """

    samples: list[Sample] = field(default_factory=list)
    num_broken: int = 0
    num_kills: int = 0
    num_open_at_kills: int = 0
    most_sequences: int = 0
    most_blocks: float = 0.0

    def attainment(self, ttft_s: float, tpot_s: float) -> float:
        """Share of all requests that were complete and met both targets."""
        good = sum(_meets(sample, ttft_s, tpot_s) for sample in self.samples)
        return good / max(1, len(self.samples))

    @property
    def failures(self) -> dict[str, int]:
        return dict(Counter(sample.error for sample in self.samples if sample.error is not None))


def _meets(sample: Sample, ttft_s: float, tpot_s: float) -> bool:
    times = sample.chunk_times_s
    if sample.error is not None or sample.sent_s is None or not times:
        return False
    gaps = max(1, sample.output_tokens - 1)
    return times[0] - sample.sent_s <= ttft_s and (times[-1] - times[0]) / gaps <= tpot_s


class Load:
    """Sends requests to an endpoint, and watches its workers meanwhile.

    Args:
        tokens: length of the answers.
        words: mean length of the prompts.
    """

    def __init__(self, url: str, tokens: int, words: int, seed: int) -> None:
        self._url = url
        self._tokens = tokens
        self._words = words
        self._random = random.Random(seed)
        self._epoch_s = time.perf_counter()
        self.outcome = Outcome()

    async def run(self, rate: float, seconds: float, kill_every_s: float | None) -> Outcome:
        async with aiohttp.ClientSession() as http:
            async with http.get(f"{self._url}/v1/models") as response:
                model = (await response.json())["data"][0]["id"]
            endpoint = Endpoint(f"{self._url}/v1", model, exact_lengths=True)
            async with LoadClient(endpoint, _TIMEOUT_S) as client, asyncio.TaskGroup() as group:
                watch = group.create_task(self._watch(http))
                kills = group.create_task(self._kill(http, kill_every_s))
                await self._send_all(client, rate, seconds)
                watch.cancel()
                kills.cancel()
        return self.outcome

    async def _send_all(self, client: LoadClient, rate: float, seconds: float) -> None:
        at_s = 0.0
        async with asyncio.TaskGroup() as requests:
            while at_s < seconds:
                at_s += self._random.expovariate(rate)
                await asyncio.sleep(max(0.0, self._epoch_s + at_s - time.perf_counter()))
                requests.create_task(self._send(client, at_s))

    async def _send(self, client: LoadClient, at_s: float) -> None:
        words = self._random.randrange(5, 2 * self._words - 5)
        spec = RequestSpec(" ".join(str(self._random.randrange(1000)) for _ in range(words)), None, self._tokens)
        for number in range(_TRIES):
            sample = Sample(at_s, at_s < _WARM_UP_S, None, self._tokens)
            await client.send(spec, sample, self._epoch_s)
            if sample.error not in _BROKEN:
                break
            self.outcome.num_broken += number == 0
            await asyncio.sleep(_PAUSE_S)  # until the client has noticed which of its connections are broken
        if not sample.is_warmup:
            self.outcome.samples.append(sample)

    async def _watch(self, http: aiohttp.ClientSession) -> None:
        while True:
            await asyncio.sleep(_POLL_S)
            status = await _status(http, self._url)
            for worker in status.get("pools", {}).get(DECODE, {}).get("workers", ()):
                sequences = worker.get("running", 0) + worker.get("waiting", 0)
                self.outcome.most_sequences = max(self.outcome.most_sequences, sequences)
                used = worker.get("kv_blocks_used", 0) / max(1, worker.get("kv_blocks_total", 1))
                self.outcome.most_blocks = max(self.outcome.most_blocks, used)

    async def _kill(self, http: aiohttp.ClientSession, every_s: float | None) -> None:
        while every_s is not None:
            await asyncio.sleep(every_s)
            routers = (await _status(http, self._url)).get("routers", ())
            pids = listeners(int(self._url.rpartition(":")[2]))
            if len(pids) < 2 or len(routers) < 2:
                continue  # the last one is not back yet
            os.kill(self._random.choice(sorted(pids)), signal.SIGKILL)
            self.outcome.num_kills += 1
            self.outcome.num_open_at_kills += max(each["requests"]["in_flight"] for each in routers)


def listeners(port: int) -> set[int]:
    """The ids of the processes that listen on a port."""
    connections = psutil.net_connections("tcp")
    return {
        each.pid for each in connections if each.status == psutil.CONN_LISTEN and each.laddr.port == port and each.pid
    }


async def _status(http: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    """The cluster's status; empty if the router that was asked is being killed."""
    try:
        async with http.get(f"{url}/admin/status", timeout=aiohttp.ClientTimeout(total=5.0)) as response:
            status: dict[str, Any] = await response.json()
            return status
    except (aiohttp.ClientError, TimeoutError):
        return {}


def _config(replicas: int) -> BatonConfig:
    return BatonConfig.from_dict(
        {
            "router": {"port": 0, "replicas": replicas, "max_inflight": 4096},
            "ray": {"num_cpus": 8},
            "simulation": {"profile": "h100-8b"},
            "prefill": {"workers": 2},
            "decode": {"workers": 4, "max_num_seqs": _DECODE_SEQS},
        }
    )


def measure(replicas: int, rate: float, seconds: float, tokens: int, words: int, kill_every_s: float | None) -> Outcome:
    """Starts a cluster, puts it under load, and stops it."""
    cluster = Cluster.start(_config(replicas), lambda _: None)
    try:
        return asyncio.run(Load(cluster.endpoint, tokens, words, seed=replicas).run(rate, seconds, kill_every_s))
    finally:
        cluster.stop()


def command(
    rate: Annotated[float, typer.Option(min=1, max=1000, help="Requests per second.")] = 100.0,
    seconds: Annotated[float, typer.Option(min=10, max=3600, help="Duration of each run.")] = 60.0,
    tokens: Annotated[int, typer.Option(min=1, max=1000, help="Tokens of each answer.")] = 32,
    words: Annotated[int, typer.Option(min=10, max=1000, help="Mean number of words of each prompt.")] = 20,
    routers: Annotated[int, typer.Option(min=2, max=16, help="Number of routers.")] = 2,
    kill_every: Annotated[float, typer.Option(min=5, help="Seconds between two kills.")] = 10.0,
    ttft: Annotated[float, typer.Option(help="Target of the time to the first token, in seconds.")] = 1.0,
    tpot: Annotated[float, typer.Option(help="Target of the time per output token, in seconds.")] = 0.05,
) -> None:
    """Compare one router, several, and several of which one is killed at a time."""
    table = Table(box=box.SIMPLE_HEAD)
    for title in ("routers", "kills", "requests", "attainment", "broken", "open at kills", "failed", "sequences", "KV"):
        table.add_column(title, justify="right")
    for count, kills in ((1, None), (routers, None), (routers, kill_every)):
        found = measure(count, rate, seconds, tokens, words, kills)
        failed = ", ".join(f"{number} x {name}" for name, number in found.failures.items()) or "0"
        table.add_row(
            str(count),
            str(found.num_kills),
            str(len(found.samples)),
            f"{found.attainment(ttft, tpot):.1%}",
            str(found.num_broken),
            f"<= {found.num_open_at_kills}",
            failed,
            f"{found.most_sequences} of {_DECODE_SEQS}",
            f"{found.most_blocks:.0%}",
        )
    console = Console(width=120)
    console.print(table)
    console.print(
        f"{rate:g} requests/s for {seconds:g} s each; prompts of {words} words and answers of {tokens} tokens; "
        f"targets {ttft:g} s and {tpot:g} s. "
        "sequences: the most that a decode worker had, running and waiting, and what it has room for."
    )


if __name__ == "__main__":
    sys.exit(run_command(command, "benchmarks.lost_routers"))
