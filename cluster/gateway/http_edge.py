"""HTTP plumbing of the gateway: request ids and times, bounded bodies, disconnects, errors in the API's shape."""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

import h11
from fastapi import Request, Response
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.core.errors import (
    BatonError,
    InternalError,
    InvalidApiKeyError,
    InvalidRequestError,
    NoWorkerError,
    OverloadedError,
    RateLimitError,
    RequestCancelledError,
    UntrustedOriginError,
)
from baton.core.logs import RequestLog, describe_fault
from cluster.gateway.anthropic.errors import anthropic_error, has_anthropic_form
from cluster.gateway.openai.responses import error_body
from cluster.gateway.server_events import json_bytes
from cluster.telemetry.metrics import UNKNOWN_ENDPOINT, HttpMetrics

logger = logging.getLogger(__name__)

REQUEST_ID_HEADER = "X-Request-Id"
_ANTHROPIC_ID_HEADER = "request-id"
MAX_HEAD_BYTES = 16 * 1024
"""Limit of the size of target and headers together."""
_POLLED_ENDPOINTS = frozenset({"/", "/health", "/ready", "/metrics", "/page/{name}"})
_VALID_REQUEST_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_ID_PREFIXES = {
    "/v1/completions": "cmpl-",
    "/v1/chat/completions": "chatcmpl-",
    "/v1/responses": "resp_",
    "/v1/messages": "msg_",
}

_WORKER_RETRY_S = "5"
"""Seconds after which a worker may have started or come back."""

_T = TypeVar("_T")


class JsonResponse(Response):
    """A JSON body."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json_bytes(content)


def error_response(error: BatonError, body: dict[str, Any] | None = None) -> JsonResponse:
    """``error`` with its HTTP status.

    Args:
        body: ``None`` for OpenAI's shape.
    """
    headers = {}
    if isinstance(error, OverloadedError):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, NoWorkerError):
        headers["Retry-After"] = _WORKER_RETRY_S
    if isinstance(error, RateLimitError):
        headers.update(error.headers)
    if isinstance(error, InvalidApiKeyError):
        headers["WWW-Authenticate"] = "Bearer"
    return JsonResponse(body or error_body(error), status_code=error.http_status, headers=headers)


def error_answer(scope: Scope, error: BatonError) -> JsonResponse:
    """The answer to a request with ``error``, in the shape of the request's API. Records the error for metrics and the
    access log."""
    scope["state"]["error_code"] = error.code
    return error_response(error, error_body_for(scope, error))


def error_body_for(scope: Scope, error: BatonError) -> dict[str, Any]:
    """``error`` in the shape of the request's API."""
    if has_anthropic_form(scope["path"]):
        return anthropic_error(error, scope["state"]["request_id"])
    return error_body(error)


def to_baton_error(error: Exception, request_id: str) -> BatonError:
    """Returns a :class:`BatonError` unchanged and any other error as an :class:`InternalError` without details.

    Other errors are logged with their place in the code, but without their message, which may quote a prompt.
    """
    if isinstance(error, BatonError):
        return error
    RequestLog(logger, request_id).error("a request failed: %s", describe_fault(error))
    return InternalError(f"Internal error. The server's log has the details under the request id {request_id}.")


def allowed_methods(request: Request) -> str:
    """The methods that the path of the request takes, as in the header ``Allow``."""
    found: set[str] = set()
    for route in request.app.routes:
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE:
            found |= route.methods or set()
    return ", ".join(sorted(found | ({"HEAD"} if "GET" in found else set())))


def request_id_of(request: Request) -> str:
    """The id that :class:`RequestContextMiddleware` gave this request."""
    request_id: str = request.scope["state"]["request_id"]
    return request_id


def set_request_id(request: Request, request_id: str) -> None:
    """Replaces the id, also in the response's header unless it was sent already."""
    request.scope["state"]["request_id"] = request_id


def add_response_headers(request: Request, headers: Mapping[str, str]) -> None:
    """Adds headers to the response, unless its start was sent already."""
    request.scope["state"].setdefault("response_headers", {}).update(headers)


def add_log_fields(request: Request, **fields: str | float | bool) -> None:
    """Adds fields to the request's line in the access log. They must not contain text chosen by a client."""
    request.scope["state"].setdefault("log_fields", {}).update(fields)


class CorsMiddleware(CORSMiddleware):
    """Starlette's, but for a refused preflight: its answer has the shape of all errors."""

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code < 400:
            return response
        refused = bytes(response.body).decode().removeprefix("Disallowed CORS ")
        allowed = f"Pages of the origins in router.cors_origins may send {', '.join(self.allow_methods)}."
        answer = error_response(UntrustedOriginError(f"The page's {refused} may not be used here. {allowed}"))
        answer.headers["Vary"] = "Origin"
        return answer


class RequestContextMiddleware:
    """Gives every request an id, returns it as ``X-Request-Id``, and turns unexpected errors into a 500.

    The client's own ``X-Request-Id`` is used if it consists of 1 to 64 characters of ``[A-Za-z0-9_.-]``, and ignored
    otherwise. A finished request is counted and logged, at level info or, on polled endpoints, debug.
    """

    def __init__(self, app: ASGIApp, metrics: HttpMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["request_id"] = _choose_request_id(scope)
        began_s = time.monotonic()
        status: int | None = None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID_HEADER] = state["request_id"]
                if has_anthropic_form(scope["path"]):
                    headers[_ANTHROPIC_ID_HEADER] = state["request_id"]
                headers.update(state.get("response_headers", {}))
            await send(message)
            if message["type"] == "http.response.start":
                status = message["status"]

        try:
            _use_target(scope)
            _check_head(scope)
            await self._app(scope, receive, send_with_id)
        except (ClientDisconnect, h11.LocalProtocolError):  # h11 raises it after an invalid body
            RequestLog(logger, state["request_id"]).debug("the client disconnected")
        except Exception as error:  # noqa: BLE001 (the outermost boundary: one request's fault must stay its own)
            response = error_answer(scope, to_baton_error(error, state["request_id"]))
            if status is None:
                await response(scope, receive, send_with_id)
        finally:
            self._observe(scope, status or RequestCancelledError.http_status, time.monotonic() - began_s)

    def _observe(self, scope: Scope, status: int, seconds: float) -> None:
        endpoint = getattr(scope.get("route"), "path", UNKNOWN_ENDPOINT)
        error_code = scope["state"].get("error_code")
        self._metrics.observe(endpoint, status, error_code)
        # The route's template, since a path may contain anything that a client sends.
        fields = {"endpoint": endpoint, "status": status, "duration_ms": round(seconds * 1e3, 1), "code": error_code}
        fields |= scope["state"].get("log_fields", {})
        level = logging.DEBUG if endpoint in _POLLED_ENDPOINTS else logging.INFO
        RequestLog(logger, scope["state"]["request_id"]).log(level, "answered", extra=fields)


def _choose_request_id(scope: Scope) -> str:
    given = Headers(scope=scope).get(REQUEST_ID_HEADER)
    if given is not None and _VALID_REQUEST_ID.fullmatch(given):
        return given
    return _ID_PREFIXES.get(scope["path"].rstrip("/"), "req-") + uuid.uuid4().hex


def _use_target(scope: Scope) -> None:
    """Takes host and path from a target that is a whole URL, whatever ``Host`` says (RFC 9112, section 3.2.2).

    Raises:
        InvalidRequestError: it is none.
    """
    if scope["path"].startswith(("http://", "https://")):
        try:
            target = urlsplit(scope["path"])
        except ValueError as error:
            raise InvalidRequestError(f"The target of the request is no URL: {error}.") from error
        host = target.netloc.rpartition("@")[2].encode()
        scope["path"] = target.path or "/"
        scope["headers"] = [(b"host", host), *(header for header in scope["headers"] if header[0] != b"host")]


def _check_head(scope: Scope) -> None:
    """Refuses heads that the HTTP parser accepts, and ends their connections.

    Raises:
        InvalidRequestError: the head is too large, has another version, or gives the body's length in two ways, of
            which a proxy may choose the other one (RFC 9112, section 6.1).
    """
    headers = Headers(scope=scope)
    problem = ""
    if "content-length" in headers and "transfer-encoding" in headers:
        problem = "Content-Length and Transfer-Encoding exclude each other; send one of them."
    elif scope.get("http_version", "1.1") not in ("1.0", "1.1"):
        problem = f"HTTP/{scope['http_version']} is not supported; send HTTP/1.1."
    elif _head_bytes(scope) > MAX_HEAD_BYTES:
        problem = f"Target and headers take more than {MAX_HEAD_BYTES // 1024} KiB, which is the limit. Send less."
    if problem:
        scope["state"]["response_headers"] = {"Connection": "close"}
        raise InvalidRequestError(problem)


def _head_bytes(scope: Scope) -> int:
    target = len(scope.get("raw_path") or b"") + len(scope["query_string"])
    return target + sum(len(name) + len(value) for name, value in scope["headers"])


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """Returns the result of ``work``, which is cancelled as soon as the client disconnects.

    Must be called after the request's body was read.

    Raises:
        RequestCancelledError: the client disconnected first.
    """
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise RequestCancelledError("The client closed the connection.")
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


RECEIVED_KEY = "received_s"
"""Key of ``scope["state"]`` for the time at which the request reached this machine, set by servers that know it."""

_ACCEPTED_KEY = "accepted_s"
_CALLBACKS_KEY = "when_over"


@dataclass(frozen=True, slots=True)
class ArrivalTimes:
    """Seconds of the monotonic clock.

    Attributes:
        received_s: time at which the request reached this machine, if the server knows it, else ``accepted_s``.
        accepted_s: time at which the application began to work on it.
    """

    received_s: float
    accepted_s: float


def arrival_of(request: Request) -> ArrivalTimes:
    """The times that :class:`RequestTimesMiddleware` recorded."""
    state = request.scope["state"]
    return ArrivalTimes(state[RECEIVED_KEY], state[_ACCEPTED_KEY])


def call_when_finished(request: Request, callback: Callable[[bool], None]) -> None:
    """Registers ``callback``, which is called once: with True when the last byte of the response was handed to the
    connection, or with False if the request ends without that. Several callbacks are called in order."""
    request.scope["state"].setdefault(_CALLBACKS_KEY, []).append(callback)


class RequestTimesMiddleware:
    """Records the arrival times of requests and calls their end callbacks. It must be the outermost middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state[_ACCEPTED_KEY] = time.monotonic()
        state.setdefault(RECEIVED_KEY, state[_ACCEPTED_KEY])

        client_left = False

        async def receive_and_watch() -> Message:
            nonlocal client_left
            message = await receive()
            client_left = client_left or message["type"] == "http.disconnect"
            return message

        async def send_and_call_back(message: Message) -> None:
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                _call_back(state, sent=not client_left)  # the server drops messages to a client that left

        try:
            await self._app(scope, receive_and_watch, send_and_call_back)
        finally:
            _call_back(state, sent=False)


def _call_back(state: dict[str, Any], *, sent: bool) -> None:
    callbacks: list[Callable[[bool], None]] = state.pop(_CALLBACKS_KEY, [])
    for callback in callbacks:
        callback(sent)
