"""Clients that send one request after the other while faults happen, and check every token."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import httpx

from tests.chaos.streams import Stream, add_moves, serve
from tests.chaos.workload import Question

_LONGEST_STAY_S = 4.0
"""A client that leaves does so within this time."""


class Load:
    """Clients of one cluster.

    Args:
        streams: takes those that have ended.
        seed: decides what each client sends.
        cancelled_share: the share of the requests whose clients leave, at random moments.
    """

    def __init__(
        self,
        http: httpx.AsyncClient,
        questions: Sequence[Question],
        streams: list[Stream],
        seed: int,
        cancelled_share: float,
    ) -> None:
        self._http = http
        self._questions = questions
        self._streams = streams
        self._seed = seed
        self._cancelled_share = cancelled_share

    async def run(self, num_clients: int, stop: asyncio.Event) -> None:
        """Sends until ``stop`` is set; requests that have begun are finished."""
        await asyncio.gather(*(self._client(number, stop) for number in range(num_clients)))

    async def _client(self, number: int, stop: asyncio.Event) -> None:
        chance = random.Random(f"{self._seed} client {number}")
        while not stop.is_set():
            question = chance.choice(self._questions)
            stream = Stream(question, question.body(chance))
            leaves = chance.random() < self._cancelled_share
            await serve(self._http, stream, chance.uniform(0, _LONGEST_STAY_S) if leaves else None)
            if stream.request_id and not stream.is_cancelled:
                await add_moves(self._http, stream)
            self._streams.append(stream)
