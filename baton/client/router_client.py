"""HTTP client of the router, for the command line and the demo. Programs use the ``openai`` package instead."""

from __future__ import annotations

import ipaddress
import json
import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self
from urllib.parse import quote, urlsplit

import httpx

from baton.client.event_stream import DONE, EventSplitter
from baton.client.trust import CA_VARIABLE, tls_context
from baton.core.errors import BatonError, ConfigError, InvalidRequestError, OverloadedError, error_classes

CHAT_PATH = "/v1/chat/completions"
COMPLETION_PATH = "/v1/completions"
_QUICK = httpx.Timeout(30.0, connect=10.0)
_GENERATION = httpx.Timeout(None, connect=10.0)
"""The router has its own deadline. A shorter timeout here would hide its error."""

_JSON_HEADERS = {"Content-Type": "application/json"}
API_KEY_VARIABLE = "BATON_API_KEY"
_IN_FLIGHT = "baton_requests_in_flight"


class RouterUnreachableError(BatonError):
    """The endpoint does not answer, or does not speak the router's protocol."""

    code = "router_unreachable"
    grpc_status = "UNAVAILABLE"
    http_status = 503


class UntrustedRouterError(BatonError):
    """The endpoint's certificate is not one that this client accepts."""

    code = "router_untrusted"
    grpc_status = "UNAVAILABLE"
    http_status = 503


class ResponseError(BatonError):
    """The router refused or failed a request with an error that has no class of its own here."""

    code = "response_error"


def encode_body(body: object) -> bytes:
    """Encodes a body as JSON in UTF-8.

    Raises:
        InvalidRequestError: the values have no JSON form: a lone surrogate, NaN, or too deep nesting.
    """
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidRequestError(f"The request cannot be written as JSON: {error}.") from error


class RouterClient:
    """One connection pool to one router. Every method raises BatonError with the router's own message.

    A key in the environment variable ``BATON_API_KEY`` is sent as bearer token.

    Args:
        ca: certificates to trust; see :func:`baton.client.trust.tls_context`.

    Raises:
        ConfigError: the variable holds no valid key, the endpoint is not a URL, or the certificates to trust cannot be
            read.
    """

    def __init__(
        self, endpoint: str, ca: Path | None = None, *, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        """``transport`` replaces the network, for tests."""
        self.endpoint = endpoint
        api_key = _api_key()
        try:
            trust = tls_context(endpoint, ca)
            self._http = httpx.AsyncClient(
                base_url=endpoint,
                headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
                timeout=_QUICK,
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
                verify=True if trust is None else trust,
                transport=transport,
                trust_env=not is_loopback(endpoint),  # a proxy of the environment cannot reach this machine's loopback
            )
        except (httpx.InvalidURL, ValueError) as error:
            raise ConfigError(f"{endpoint!r} is not an endpoint: {error}.") from error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def status(self) -> dict[str, Any]:
        """Pools, workers, blocks and requests, from ``GET /admin/status``."""
        return await self._json("GET", "/admin/status")

    async def scale(self, targets: Mapping[str, int | str]) -> dict[str, Any]:
        """Sets the number of workers of the named pools, or ``auto``. Returns once the router has accepted it."""
        return await self._json("POST", "/admin/scale", dict(targets))

    async def change_role(self, source: str, destination: str) -> dict[str, Any]:
        """Moves a worker from one pool to the other. Returns once the router has accepted it."""
        return await self._json("POST", "/admin/move", {"from": source, "to": destination})

    async def plan(self) -> dict[str, Any]:
        """The next step of the autoscaler."""
        return await self._json("GET", "/admin/plan")

    async def advise(self) -> dict[str, Any]:
        """Advice on a better use of the workers for the observed traffic."""
        return await self._json("GET", "/admin/advise")

    async def trace(self) -> list[dict[str, Any]]:
        """The recorded traffic as lines of a trace in Mooncake's format, in order of arrival."""
        requests: list[dict[str, Any]] = (await self._json("GET", "/admin/trace"))["requests"]
        return requests

    async def num_in_flight(self) -> int:
        """Number of sequences that the router works on or queues, from ``GET /metrics``."""
        try:
            response = await self._http.get("/metrics")
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        if response.status_code == httpx.codes.UNAUTHORIZED:
            raise _error_of(response.status_code, response.content, response.headers)
        lines = (line.rpartition(" ") for line in response.text.splitlines())
        numbers = [int(float(value)) for series, _, value in lines if series.partition("{")[0] == _IN_FLIGHT]
        if numbers:  # one for each router
            return sum(numbers)
        raise RouterUnreachableError(f"{self.endpoint}/metrics has no {_IN_FLIGHT}.")

    async def model(self) -> str:
        """Name of the served model."""
        models = await self._json("GET", "/v1/models")
        try:
            return str(models["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise RouterUnreachableError(f"{self.endpoint}/v1/models does not list a model.") from error

    async def timeline(self, request_id: str) -> dict[str, Any]:
        """Waterfall of a finished request; times in milliseconds since it was received."""
        return await self._json("GET", f"/v1/requests/{quote(request_id, safe='')}/timeline")

    async def requests(self, order: str, limit: int) -> list[dict[str, Any]]:
        """The newest or the slowest requests with a stored timeline."""
        answer = await self._json("GET", f"/v1/requests?order={order}&limit={limit}")
        data = answer.get("data")
        if not isinstance(data, list):
            raise RouterUnreachableError(f"{self.endpoint}/v1/requests does not list requests.")
        return data

    async def generate(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Sends a request in OpenAI's shape and returns the whole answer.

        Args:
            path: ``CHAT_PATH`` or ``COMPLETION_PATH``.
        """
        return await self._json("POST", path, dict(body), _GENERATION)

    async def upload(self, name: str, content: BinaryIO) -> str:
        """Uploads a file of requests for a batch, and returns its id."""
        files = {"file": (name, content, "application/jsonl")}
        try:
            response = await self._http.post("/v1/files", data={"purpose": "batch"}, files=files, timeout=_GENERATION)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        return str(self._object_in(response)["id"])

    async def download(self, file_id: str, target: BinaryIO) -> None:
        """Writes the content of a file of the router to ``target``."""
        path = f"/v1/files/{quote(file_id, safe='')}/content"
        try:
            async with self._http.stream("GET", path) as response:
                if response.status_code != 200:
                    raise _error_of(response.status_code, await response.aread(), response.headers)
                async for data in response.aiter_bytes():
                    target.write(data)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error

    async def create_batch(self, file_id: str, endpoint: str) -> dict[str, Any]:
        """Makes a batch of an uploaded file."""
        body = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": "24h"}
        return await self._json("POST", "/v1/batches", body)

    async def batches(self, limit: int) -> list[dict[str, Any]]:
        """The newest batches."""
        return list((await self._json("GET", f"/v1/batches?limit={limit}"))["data"])

    async def batch(self, batch_id: str) -> dict[str, Any]:
        """The state of a batch."""
        return await self._json("GET", f"/v1/batches/{quote(batch_id, safe='')}")

    async def cancel_batch(self, batch_id: str) -> dict[str, Any]:
        """Asks for the end of a batch, and returns its state."""
        return await self._json("POST", f"/v1/batches/{quote(batch_id, safe='')}/cancel")

    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Yields the chunks of a streamed answer as they arrive. Closing the iterator cancels the request."""
        content = encode_body({**body, "stream": True})
        try:
            async with self._http.stream(
                "POST", path, content=content, headers=_JSON_HEADERS, timeout=_GENERATION
            ) as response:
                if response.status_code != 200:
                    raise _error_of(response.status_code, await response.aread(), response.headers)
                splitter = EventSplitter()
                async for data in response.aiter_bytes():
                    for payload in splitter.feed(data):
                        if payload == DONE:
                            return
                        if payload:
                            yield _chunk(payload)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        raise RouterUnreachableError(f"{self.endpoint} ended the stream before it was complete.")

    async def _json(
        self, method: str, path: str, body: object = None, timeout: httpx.Timeout = _QUICK
    ) -> dict[str, Any]:
        try:
            content = None if body is None else encode_body(body)
            headers = _JSON_HEADERS if content else None
            response = await self._http.request(method, path, content=content, headers=headers, timeout=timeout)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        return self._object_in(response)

    def _object_in(self, response: httpx.Response) -> dict[str, Any]:
        if response.status_code != 200:
            raise _error_of(response.status_code, response.content, response.headers)
        try:
            values = response.json()
        except ValueError as error:
            raise RouterUnreachableError(f"{response.url} did not answer with JSON.") from error
        if not isinstance(values, dict):
            raise RouterUnreachableError(f"{response.url} did not answer with a JSON object.")
        return values

    def _unreachable(self, error: httpx.HTTPError) -> BatonError:
        # A protocol error may quote headers, including the key.
        reason = type(error).__name__ if isinstance(error, httpx.ProtocolError) else str(error) or type(error).__name__
        hint = "Is the cluster running? See `baton up`. A router that was lost serves again within seconds."
        if "CERTIFICATE_VERIFY_FAILED" in reason:
            hint = f"Name a file with the certificate of the router, or of its issuer, with --ca or in {CA_VARIABLE}."
            return UntrustedRouterError(f"No answer from {self.endpoint} ({reason}). {hint}")
        if isinstance(error, httpx.ReadTimeout):
            hint = "It accepts connections, but may hang; then `baton up` says so, and replaces it. Try again."
        elif isinstance(error, httpx.ReadError | httpx.WriteError | httpx.RemoteProtocolError):
            hint = "The connection broke off, as it does when the router is lost and replaced. Try again."
        return RouterUnreachableError(f"No answer from {self.endpoint} ({reason}). {hint}")


def _api_key() -> str | None:
    """The key in the environment. Raises :class:`ConfigError`, without quoting it, if it cannot be sent."""
    key = os.environ.get(API_KEY_VARIABLE, "").strip()
    if key and not (key.isascii() and key.isprintable() and " " not in key):
        raise ConfigError(
            f"The environment variable {API_KEY_VARIABLE} does not contain a valid API key; expected visible ASCII "
            "characters without spaces."
        )
    return key or None


def _chunk(payload: bytes) -> dict[str, Any]:
    data = payload.decode(errors="replace")
    try:
        values = json.loads(data)
    except ValueError as error:
        raise RouterUnreachableError(f"The stream contains a line that is not JSON: {data[:80]}") from error
    if not isinstance(values, dict):
        raise RouterUnreachableError(f"The stream contains a line that is not a JSON object: {data[:80]}")
    if "error" in values:
        raise _error_from_body(values, "the request failed", None)
    return values


def _error_of(status: int, content: bytes, headers: Mapping[str, str]) -> BatonError:
    try:
        values = json.loads(content)
    except ValueError:
        values = {}
    return _error_from_body(values, f"the router answered with HTTP status {status}", headers.get("retry-after"))


def _error_from_body(values: object, fallback: str, retry_after: str | None) -> BatonError:
    """Rebuilds an error in OpenAI's shape, with its original class if that is known."""
    error = values.get("error") if isinstance(values, dict) else None
    if not isinstance(error, dict):
        return ResponseError(fallback[0].upper() + fallback[1:] + ".")
    message, param = str(error.get("message") or fallback), error.get("param")
    cls = error_classes().get(str(error.get("code")), ResponseError)
    if issubclass(cls, OverloadedError):
        return cls(message, param=param, retry_after_s=_seconds(retry_after))
    return cls(message, param=param)


def _seconds(text: str | None) -> float:
    try:
        return max(0.0, float(text)) if text is not None else 1.0
    except ValueError:
        return 1.0


def is_loopback(url: str) -> bool:
    """Whether a URL names this machine's loopback interface, which proxies cannot reach."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
