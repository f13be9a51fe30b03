"""The load: HTTP/1.1 requests on persistent connections, and the same work requested from a worker over gRPC."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from math import inf

import aiohttp

from baton.core.errors import InternalError
from baton.core.request import SamplingParams
from baton.core.roles import PREFILL
from baton.rpc.conversions import pack_sequence
from baton.rpc.credentials import ClusterSecret, PeerCredentials
from baton.rpc.wire import worker_pb2
from benchmarks.router_load.processes import RouterUnderTest
from cluster.registry.worker_client import WorkerClient
from cluster.simulation.standalone import SECRET

_REQUEST_TIMEOUT_S = 120.0
_KEPT_IDLE_S = 2.0
"""Less than the server's limit for idle connections, which might close one just when a request is sent."""
_LAST_EVENT = b'"finish_reason":"length"'
_PROMPT = "The router takes a request, looks at its workers and sends it to those that will serve it best. " * 3

_LONG = 20


@dataclass(frozen=True, slots=True)
class StreamOutcome:
    """The measurements of a finished stream.

    Attributes:
        longest_gap_s: longest time between two events.
        settled_gap_s: longest gap that began after all streams were open.
    """

    num_events: int
    first_s: float
    seconds: float
    longest_gap_s: float
    settled_gap_s: float


class HttpLoad:
    """Requests to the router's endpoint.

    Attributes:
        settled_s: when all streams were open, by ``time.perf_counter``.
    """

    def __init__(self, session: aiohttp.ClientSession, target: RouterUnderTest) -> None:
        self._session = session
        self._url = f"{target.endpoint}/v1/completions"
        self._model = target.model
        self.settled_s = inf

    async def one_token(self, number: int) -> float:
        """Requests one token; returns the seconds until the whole answer."""
        return await self._post(self._body(number, 1))

    async def long_prompt(self, number: int) -> float:
        """Requests one token after a prompt of several thousand tokens."""
        return await self._post(self._body(number, 1) | {"prompt": f"{number} {_PROMPT * _LONG}"})

    async def stream(self, number: int, num_tokens: int) -> StreamOutcome:
        """Reads a stream as fast as it arrives.

        Raises:
            InternalError: the stream failed, or ended early.
        """
        began_s = last_s = time.perf_counter()
        first_s = longest_s = settled_s = 0.0
        num_events, tail = 0, b""
        async with self._session.post(self._url, json=self._body(number, num_tokens) | {"stream": True}) as response:
            if response.status != 200:
                _check(response, await response.read())
            async for data in response.content.iter_any():
                now_s = time.perf_counter()
                if first_s:
                    longest_s = max(longest_s, now_s - last_s)
                    if last_s >= self.settled_s:
                        settled_s = max(settled_s, now_s - last_s)
                else:
                    first_s = now_s - began_s
                last_s = now_s
                num_events += data.count(b"data: ")
                tail = (tail + data)[-512:]
        if b"data: [DONE]" not in tail or _LAST_EVENT not in tail:
            raise InternalError(f"a stream ended early: {tail[-200:]!r}")
        return StreamOutcome(num_events, first_s, last_s - began_s, longest_s, settled_s)

    async def _post(self, body: dict[str, object]) -> float:
        began_s = time.perf_counter()
        async with self._session.post(self._url, json=body) as response:
            _check(response, await response.read())
        return time.perf_counter() - began_s

    def _body(self, number: int, num_tokens: int) -> dict[str, object]:
        prompt = f"{number} {_PROMPT}"
        return {"model": self._model, "prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "seed": number}


class DirectLoad:
    """One-token requests to a prefill worker, without a router."""

    def __init__(self, target: RouterUnderTest) -> None:
        address = next(info.address for info in target.infos if info.pool == PREFILL)
        self._client = WorkerClient(address, PeerCredentials(ClusterSecret(SECRET)))

    async def one_token(self, number: int) -> float:
        """Requests one token; returns the seconds until the end of the call."""
        began_s = time.perf_counter()
        prompt = [number % 10_000 + 1, *range(100, 180)]
        sequence = pack_sequence(f"direct-{number}", prompt, SamplingParams(max_tokens=1, ignore_eos=True))
        events = self._client.prefill(worker_pb2.PrefillRequest(sequence=sequence), _REQUEST_TIMEOUT_S)
        async with aclosing(events):
            async for _ in events:
                pass
        return time.perf_counter() - began_s

    async def close(self) -> None:
        await self._client.close()


@asynccontextmanager
async def http_load(target: RouterUnderTest) -> AsyncGenerator[HttpLoad]:
    """An HTTP load that can be used within the context."""
    timeout = aiohttp.ClientTimeout(total=_REQUEST_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEPT_IDLE_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        yield HttpLoad(session, target)


async def open_loop(send: Callable[[int], Awaitable[float]], rate: float, count: int, first: int = 0) -> list[float]:
    """Sends requests at a constant rate, independent of earlier ones; returns their results in order.

    The time of a late request counts from when it was due, as its client would count.

    Args:
        rate: requests per second.
        first: number of the first request.
    """
    began_s = time.perf_counter()
    tasks: list[asyncio.Task[float]] = []
    for index in range(count):
        due_s = began_s + index / rate
        left_s = due_s - time.perf_counter()
        if left_s > 0:
            await asyncio.sleep(left_s)
        tasks.append(asyncio.create_task(_timed(send, first + index, due_s)))
    return list(await asyncio.gather(*tasks))


async def _timed(send: Callable[[int], Awaitable[float]], number: int, due_s: float) -> float:
    late_s = max(0.0, time.perf_counter() - due_s)
    return late_s + await send(number)


def _check(response: aiohttp.ClientResponse, body: bytes) -> None:
    if response.status != 200:
        raise InternalError(f"the router answered {response.status}: {body[:300]!r}")
