"""Streams of one cluster, as their clients see them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx

from baton.client.event_stream import DONE, EventSplitter, error_in, parse_event
from tests.chaos.workload import Question

HUNG_S = 120.0
"""A stream that has not ended after this time hangs."""


@dataclass(slots=True)
class Stream:
    """One request and what came of it.

    Attributes:
        sent_s: monotonic seconds.
        arrivals_s: when its tokens came; monotonic seconds.
        moves_s: when its router gave up the workers of an attempt, and moved it to others.
        error: why it has no answer; empty if it has.
    """

    question: Question
    body: dict[str, Any]
    sent_s: float = field(default_factory=time.monotonic)
    request_id: str = ""
    token_ids: list[int] = field(default_factory=list)
    arrivals_s: list[float] = field(default_factory=list)
    moves_s: list[float] = field(default_factory=list)
    is_cancelled: bool = False
    error: str = ""

    @property
    def gaps_s(self) -> Iterator[tuple[float, float]]:
        """Begin and end of the times without a token, from sending the request on."""
        return pairwise((self.sent_s, *self.arrivals_s))

    @property
    def is_wrong(self) -> bool:
        """Whether tokens are lost, duplicated or changed."""
        expected = self.question.expected
        if self.is_cancelled or self.error:
            return self.token_ids != list(expected[: len(self.token_ids)])
        return self.token_ids != list(expected)


class StreamError(Exception):
    """A stream that failed; the message says how."""


async def serve(http: httpx.AsyncClient, stream: Stream, cancel_after_s: float | None = None) -> None:
    """Sends the request and reads its stream to the end, or leaves after ``cancel_after_s``. Records failures in it."""
    try:
        async with asyncio.timeout(HUNG_S if cancel_after_s is None else cancel_after_s):
            await _read(http, stream)
    except TimeoutError:
        stream.is_cancelled = cancel_after_s is not None
        stream.error = "" if stream.is_cancelled else f"it hangs: no end after {HUNG_S:g} s"
    except (httpx.HTTPError, StreamError) as failure:
        stream.error = f"{type(failure).__name__}: {failure}"


async def add_moves(http: httpx.AsyncClient, stream: Stream) -> None:
    """Takes from its timeline when the stream was moved. The client's clock and the router's are the same."""
    answer = await http.get(f"/v1/requests/{stream.request_id}/timeline", timeout=HUNG_S)
    failures = answer.json()["failed_attempts"] if answer.status_code == 200 else ()
    stream.moves_s = [stream.sent_s + failure["at_ms"] / 1e3 for failure in failures]


async def _read(http: httpx.AsyncClient, stream: Stream) -> None:
    async with http.stream("POST", "/v1/completions", json=stream.body) as response:
        if response.status_code != 200:
            raise StreamError(f"{response.status_code}: {(await response.aread()).decode(errors='replace')[:500]}")
        splitter = EventSplitter()
        async for data in response.aiter_bytes():
            for payload in splitter.feed(data):
                if payload == DONE:
                    return
                event = parse_event(payload)
                if (failure := error_in(event)) is not None:
                    raise StreamError(": ".join(failure))
                stream.arrivals_s.append(time.monotonic())
                stream.request_id = event["id"]
                stream.token_ids += event["choices"][0]["token_ids"]
    raise StreamError("the stream ended without [DONE]")
