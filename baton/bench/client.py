"""Sends one request and times its stream, with little work of its own, since that is part of every figure."""

from __future__ import annotations

import asyncio
import time
from array import array
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import aiohttp

from baton.bench.endpoint import Endpoint, RequestSpec
from baton.bench.sample import UNFINISHED, Sample
from baton.client.event_stream import DONE, EventSplitter, error_in, has_choice, has_text, parse_event
from baton.client.trust import tls_context
from baton.core.request_ids import new_warmup_id

_CONNECT_TIMEOUT_S = 10.0
_MAX_ERROR_CHARS = 300
_REQUEST_ID_HEADER = "X-Request-Id"
CONNECT_ERROR = "connect"
TIMEOUT_ERROR = "timeout"
DISCONNECTED_ERROR = "disconnected"
TRUNCATED_ERROR = "truncated"
EMPTY_ERROR = "empty"
MALFORMED_ERROR = "malformed"


class StreamError(Exception):
    """An invalid or failed answer.

    Attributes:
        kind: the kind by which failures are counted.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class LoadClient:
    """Connections to one endpoint, one per request in flight."""

    def __init__(self, endpoint: Endpoint, timeout_s: float) -> None:
        """``timeout_s`` limits each request from its sending to the end of its stream."""
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=tls_context(endpoint.base_url) or True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
            headers=endpoint.headers,
            trust_env=not endpoint.is_loopback,
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._http.close()

    async def send(self, spec: RequestSpec, sample: Sample, epoch_s: float) -> None:
        """Sends a request and fills ``sample``, also with a failure.

        Args:
            epoch_s: the moment of ``time.perf_counter`` from which the sample's times count.
        """
        body = self._endpoint.body(spec)
        sample.error = UNFINISHED
        sample.sent_s = time.perf_counter() - epoch_s
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._stream(body, sample, epoch_s)
        except StreamError as error:
            _fail(sample, error.kind, str(error))
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            # The second one is also a TimeoutError, but not that of the request.
            _fail(sample, CONNECT_ERROR, str(error))
        except TimeoutError:
            _fail(sample, TIMEOUT_ERROR, f"no complete answer within {self._timeout_s:g} s")
        except (aiohttp.ClientError, OSError) as error:
            _fail(sample, DISCONNECTED_ERROR, str(error) or type(error).__name__)
        else:
            sample.error = None
        sample.finished_s = time.perf_counter() - epoch_s

    async def _stream(self, body: bytes, sample: Sample, epoch_s: float) -> None:
        answer = _Answer(sample)
        headers = {_REQUEST_ID_HEADER: new_warmup_id()} if sample.is_warmup else None
        async with self._http.post(self._endpoint.generate_url, data=body, headers=headers) as response:
            sample.request_id = response.headers.get(_REQUEST_ID_HEADER)
            if response.status != 200:
                raise StreamError(f"http_{response.status}", _error_message(await response.read()))
            splitter = EventSplitter()
            async for data in response.content.iter_any():
                now_s = time.perf_counter() - epoch_s
                for payload in splitter.feed(data):
                    answer.add(payload, now_s)
        answer.complete()


@dataclass(frozen=True, slots=True)
class _Usage:
    """The token counts of a server, with defaults for missing ones."""

    input_tokens: int | None = None
    output_tokens: int = 0
    cached_tokens: int = 0

    @classmethod
    def of(cls, usage: Any) -> _Usage:
        """Reads a ``usage`` object.

        Raises:
            StreamError: it is not an object of counts.
        """
        try:
            prompt = usage.get("prompt_tokens")
            counts = cls(
                None if prompt is None else int(prompt),
                int(usage.get("completion_tokens") or 0),
                int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0),
            )
        except (AttributeError, TypeError, ValueError) as error:
            raise StreamError(MALFORMED_ERROR, f"invalid usage: {str(usage)[:80]}") from error
        if min(counts.input_tokens or 0, counts.output_tokens, counts.cached_tokens) < 0:
            raise StreamError(MALFORMED_ERROR, f"negative usage: {str(usage)[:80]}")
        return counts


class _Answer:
    """Reads one stream into a sample."""

    def __init__(self, sample: Sample) -> None:
        self._sample = sample
        self._textless_times_s = array("d")
        self._is_finished = False
        self._usage = _Usage()

    def add(self, payload: bytes, now_s: float) -> None:
        """Reads an event.

        Raises:
            StreamError: the event is an error or malformed.
        """
        if payload == DONE:
            self._is_finished = True
            return
        try:
            event = parse_event(payload)
        except ValueError as error:
            raise StreamError(MALFORMED_ERROR, f"{error}: {payload[:80]!r}") from error
        if (failure := error_in(event)) is not None:
            raise StreamError(f"stream_{failure[0]}", failure[1][:_MAX_ERROR_CHARS])
        try:
            is_text = has_text(event)
        except (AttributeError, TypeError) as error:
            raise StreamError(MALFORMED_ERROR, f"invalid choices: {payload[:80]!r}") from error
        if is_text:
            self._sample.chunk_times_s.append(now_s)
        elif has_choice(event):
            self._textless_times_s.append(now_s)
        if usage := event.get("usage"):
            self._usage = _Usage.of(usage)

    def complete(self) -> None:
        """Completes the sample at the end of the stream.

        Raises:
            StreamError: the stream is truncated or empty.
        """
        if not self._is_finished:
            raise StreamError(TRUNCATED_ERROR, "the stream ended without [DONE]")
        sample, usage = self._sample, self._usage
        reported = usage.output_tokens
        if reported and not sample.chunk_times_s:
            # Tokens without text, such as special ones, count too.
            sample.chunk_times_s = self._textless_times_s
        if not sample.chunk_times_s:
            raise StreamError(EMPTY_ERROR, "the answer has no tokens")
        sample.counts_are_chunks = not reported
        sample.output_tokens = reported or len(sample.chunk_times_s)
        sample.input_tokens = usage.input_tokens
        sample.cached_tokens = usage.cached_tokens


def _error_message(content: bytes) -> str:
    """The text of an error response: OpenAI's ``error.message``, else the whole body."""
    try:
        failure = error_in(parse_event(content))
    except ValueError:
        failure = None
    text = failure[1] if failure is not None else ""
    return (text or content.decode(errors="replace"))[:_MAX_ERROR_CHARS]


def _fail(sample: Sample, kind: str, message: str) -> None:
    sample.error = kind
    sample.error_message = message
