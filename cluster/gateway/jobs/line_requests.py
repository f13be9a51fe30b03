"""Lines of jobs as requests of the gateway itself, so that they take the path of every other request.

They skip the socket, and the check of the API key: their job was made with it.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial

import orjson
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Scope

from baton.core.errors import BatonError, InvalidApiKeyError, InvalidRequestError
from baton.core.slo import BATCH, SLO_CLASS_HEADER
from cluster.gateway.access import inner_state
from cluster.gateway.api_keys import ApiKey, ApiKeys, KeyLimits
from cluster.gateway.http_edge import REQUEST_ID_HEADER, error_response
from cluster.gateway.openai.json_body import json_limits, parse_object
from cluster.gateway.openai.plan import GatewayLimits
from cluster.jobs.job_types import Job, Line
from cluster.jobs.jobs import Endpoint
from cluster.jobs.result_lines import Answer, line_id
from cluster.requests.generation import Generator

_HOST = "localhost"


def job_endpoint(app: ASGIApp, api_keys: ApiKeys, generator: Generator, limits: GatewayLimits) -> Endpoint:
    """The gateway's ``app``, as jobs see it."""
    return Endpoint(
        send=LineRequests(app, api_keys),
        parse=partial(parse_object, limits=json_limits(generator.model.max_model_len)),
        max_line_bytes=limits.max_body_bytes,
        models=lambda: generator.model.names,
    )


class LineRequests:
    """Implements :class:`cluster.jobs.result_lines.LineSender`.

    Args:
        app: the gateway's application.
        api_keys: the keys of the endpoint.
    """

    def __init__(self, app: ASGIApp, api_keys: ApiKeys) -> None:
        self._app = app
        self._api_keys = api_keys

    async def __call__(self, job: Job, line: Line) -> Answer:
        api_key: ApiKey | None = None
        if self._api_keys:
            found = self._api_keys.named(job.owner)
            if found is None:
                gone = InvalidApiKeyError("The API key that made the batch does not exist any more.")
                return _refused(job, line, gone)
            # As with OpenAI, batches do not use up the limits of interactive requests.
            api_key = replace(found, limits=KeyLimits())
        if orjson.loads(line.body).get("stream"):
            problem = InvalidRequestError("stream is not supported in a batch. Leave it out.", param="stream")
            return _refused(job, line, problem)
        exchange = _Exchange(line.body)
        await self._app(_scope(job, line, api_key), exchange.receive, exchange.send)
        return exchange.answer()


def _refused(job: Job, line: Line, error: BatonError) -> Answer:
    return Answer(error.http_status, line_id(job, line), bytes(error_response(error).body))


class _Exchange:
    """One request to the application, and its answer."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self._status = 0
        self._headers = Headers()
        self._parts: list[bytes] = []

    async def receive(self) -> Message:
        if self._body is None:
            await asyncio.Event().wait()  # this client never disconnects; its task is cancelled
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status, self._headers = message["status"], Headers(raw=message["headers"])
        else:
            self._parts.append(message.get("body", b""))

    def answer(self) -> Answer:
        retry_after = self._headers.get("retry-after")
        return Answer(
            self._status,
            self._headers.get(REQUEST_ID_HEADER, ""),
            b"".join(self._parts),
            None if retry_after is None else float(retry_after),
        )


def _scope(job: Job, line: Line, api_key: ApiKey | None) -> Scope:
    headers = {
        "host": _HOST,
        "content-type": "application/json",
        "content-length": str(len(line.body)),
        REQUEST_ID_HEADER: line_id(job, line),
        SLO_CLASS_HEADER: BATCH.name,
    }
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "scheme": "http",
        "method": "POST",
        "path": job.endpoint,
        "raw_path": job.endpoint.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
        "server": (_HOST, 80),
        "client": None,
        "state": inner_state(api_key),
    }
