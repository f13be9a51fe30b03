"""Sends requests to a cluster and records their tokens, their latencies, and where their time went."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from baton.client.router_client import COMPLETION_PATH, RouterClient
from benchmarks.device_cluster.requests import PlannedRequest


@dataclass(frozen=True, slots=True)
class Answer:
    """The tokens of one request, and when the first and the last arrived, in seconds after it was sent."""

    request_id: str
    token_ids: list[int]
    ttft_s: float
    e2e_s: float

    @property
    def tpot_s(self) -> float:
        """Mean time per output token after the first."""
        return (self.e2e_s - self.ttft_s) / max(1, len(self.token_ids) - 1)


@dataclass(frozen=True, slots=True)
class Load:
    """All answers, in the order of the requests.

    Attributes:
        wall_s: duration of the whole load in seconds.
        stages_ms: for each stage of `baton explain`, the median of its time in all requests, 0 where it is missing.
    """

    answers: list[Answer]
    wall_s: float
    stages_ms: dict[str, float]

    def figures(self) -> dict[str, float]:
        """Medians in milliseconds, and output tokens per second."""
        return {
            "ttft_p50_ms": 1e3 * statistics.median(answer.ttft_s for answer in self.answers),
            "tpot_p50_ms": 1e3 * statistics.median(answer.tpot_s for answer in self.answers),
            "output_tokens_per_s": sum(len(answer.token_ids) for answer in self.answers) / self.wall_s,
        }


async def send(endpoint: str, asked: Sequence[PlannedRequest], concurrency: int) -> Load:
    """Sends all requests, at most ``concurrency`` at a time.

    Raises:
        BatonError: a request failed.
    """
    places = asyncio.Semaphore(concurrency)

    async with RouterClient(endpoint) as client:
        model = await client.model()

        async def one(each: PlannedRequest) -> Answer:
            async with places:
                return await _stream(client, each, model)

        started_s = time.perf_counter()
        answers = await asyncio.gather(*map(one, asked))
        wall_s = time.perf_counter() - started_s
        return Load(list(answers), wall_s, await _stages_of(client, answers))


async def _stages_of(client: RouterClient, answers: Sequence[Answer]) -> dict[str, float]:
    found: defaultdict[str, list[float]] = defaultdict(list)
    for answer in answers:
        timeline = await client.timeline(answer.request_id)
        for stage in timeline["stages"]:
            found[stage["name"]].append(stage["duration_ms"])
    return {name: statistics.median([*own, *[0.0] * (len(answers) - len(own))]) for name, own in found.items()}


async def _stream(client: RouterClient, asked: PlannedRequest, model: str) -> Answer:
    started_s = time.perf_counter()
    request_id, token_ids = "", list[int]()
    first_s = last_s = 0.0
    async for chunk in client.stream(COMPLETION_PATH, asked.body(model)):
        request_id = chunk.get("id", request_id)
        for choice in chunk.get("choices", ()):
            new = choice.get("token_ids") or ()
            if new:
                last_s = time.perf_counter() - started_s
                first_s = first_s or last_s
                token_ids.extend(new)
    return Answer(request_id, token_ids, first_s, last_s)
