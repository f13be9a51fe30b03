"""gRPC conventions: servers and channels of the cluster's processes, and errors that keep their class across them."""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from baton.core.errors import (
    BatonError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    OutOfMemoryError,
    OverloadedError,
    WorkerLostError,
    rebuild_error,
)
from baton.core.logs import RequestLog
from baton.core.no_memory import OUT_OF_MEMORY, says_no_memory
from baton.core.request_ids import request_id_of_call
from baton.process.ports import ANY_PORT, PortRange
from baton.rpc.certificates import CLUSTER_NAME
from baton.rpc.credentials import CallGuard, PeerCredentials
from baton.rpc.node_certificates import server_credentials

ERROR_KEY = "baton-error"
MAX_MESSAGE_BYTES = 65 * 1024 * 1024
"""Room for the largest ``kv_transfer.part_bytes`` and its header."""
_SMALL_MESSAGE_BYTES = 4 * 1024 * 1024
"""Room for everything in a message except token ids and KV."""
_BYTES_PER_TOKEN = 8
"""A token id has four bytes; twice as many leave room for output tokens, whose ids come separately."""
_MAX_DETAILS_BYTES = 2000  # sent in HTTP/2 headers, up to three characters a byte; peers refuse above 8 KiB

_KEEPALIVE: list[tuple[str, Any]] = [
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
]
"""Both sides ping a silent peer: the end of a process behind a cut link closes no connection of the others."""
CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    *_KEEPALIVE,
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]
SERVER_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    *_KEEPALIVE,
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
]

# A call cancelled on this side raises asyncio.CancelledError, so CANCELLED means that the worker stopped.
_BROKEN = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.CANCELLED,
)


class PeerServer:
    """A gRPC server that answers only processes of its cluster.

    Args:
        max_message_bytes: limit of a received message; see :func:`message_limit`.

    Attributes:
        grpc: the server to which services are added.
    """

    def __init__(self, credentials: PeerCredentials, max_message_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._credentials = credentials
        self._guard = CallGuard(credentials.secret)
        options = [*SERVER_OPTIONS, ("grpc.max_receive_message_length", max_message_bytes)]
        self.grpc: grpc.aio.Server = grpc.aio.server(interceptors=[self._guard, UnreadableGuard()], options=options)

    def bind(self, host: str, ports: PortRange = ANY_PORT) -> str:
        """Listens at a free port of the range. Returns the address ``host:port`` that others must call.

        Raises:
            PortsExhaustedError: all ports are taken.
        """
        address = f"{host}:{ports.bind(host, lambda port: self._listen(f'{host}:{port}'))}"
        self._guard.serve_at(address)
        return address

    def _listen(self, address: str) -> int:
        certificates = self._credentials.certificates
        if certificates is None:
            return int(self.grpc.add_insecure_port(address))
        return int(self.grpc.add_secure_port(address, server_credentials(certificates)))

    async def start(self) -> None:
        await self.grpc.start()

    async def stop(self, grace: float | None) -> None:
        """Stops the server; running calls may take ``grace`` seconds to end."""
        await self.grpc.stop(grace)


class UnreadableGuard(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses requests that cannot be parsed. gRPC would answer UNKNOWN and log a traceback for each."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return handler
        kind = "unary_stream" if handler.response_streaming else "unary_unary"
        parse, answer = handler.request_deserializer, getattr(handler, kind)

        def try_to_parse(data: bytes) -> Any:
            try:
                return parse(data)
            except DecodeError:
                return None

        async def answer_readable(message: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            if message is None:
                error = InvalidRequestError(f"A request of {handler_call_details.method} cannot be parsed.")
                await abort_with(context, error)
            replies = answer(message, context)
            if not inspect.isasyncgen(replies):
                return await replies
            async with aclosing(replies):
                async for reply in replies:
                    await context.write(reply)

        return handler._replace(request_deserializer=try_to_parse, **{kind: answer_readable})


def message_limit(max_model_len: int, part_bytes: int = 0) -> int:
    """Bytes of the largest message that a worker has to accept.

    Args:
        max_model_len: tokens of the longest sequence.
        part_bytes: bytes of the largest part of KV, on workers that receive KV.
    """
    return _SMALL_MESSAGE_BYTES + max(_BYTES_PER_TOKEN * max_model_len, part_bytes)


def create_channel(address: str, credentials: PeerCredentials) -> grpc.aio.Channel:
    """Creates a channel to a process of the cluster. Calls must carry :meth:`PeerCredentials.call_metadata`."""
    certificates = credentials.current_certificates()
    if certificates is None:
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    options = [*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", CLUSTER_NAME)]
    return grpc.aio.secure_channel(address, certificates.channel_credentials(), options=options)


def as_baton_error(error: BaseException, call_id: str) -> BatonError:
    """Returns a ``BatonError`` unchanged, and any other error as an internal error without its text."""
    if isinstance(error, BatonError):
        return error
    if says_no_memory(error):
        return OutOfMemoryError(OUT_OF_MEMORY)
    request_id = request_id_of_call(call_id)
    return InternalError(f"A worker failed unexpectedly. Its log has the details under the request id {request_id}.")


async def abort_with(context: grpc.aio.ServicerContext[Any, Any], error: BatonError) -> NoReturn:
    """Ends a call with the error's status, message and class."""
    metadata = [(ERROR_KEY, error.code)]
    if isinstance(error, OverloadedError):
        metadata.append(("retry-after-s", str(error.retry_after_s)))
    encoded = error.message.encode(errors="replace")
    details = encoded[:_MAX_DETAILS_BYTES].decode(errors="ignore") + "…" * (len(encoded) > _MAX_DETAILS_BYTES)
    await context.abort(grpc.StatusCode[error.grpc_status], details, tuple(metadata))
    raise AssertionError("abort returned")


def error_from_rpc(error: grpc.aio.AioRpcError, peer: str) -> BatonError:
    """The error that the peer raised; a broken connection becomes :class:`WorkerLostError`."""
    metadata = {str(key): value for key, value in (error.trailing_metadata() or ())}
    code = metadata.get(ERROR_KEY)
    message = error.details() or ""
    if code is not None:
        rebuilt = rebuild_error(str(code), message)
        if isinstance(rebuilt, OverloadedError):
            rebuilt.retry_after_s = float(metadata.get("retry-after-s", 1.0))
        return rebuilt
    status = error.code()
    if status is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineError(f"{peer} did not answer in time.")
    if status in _BROKEN:
        return WorkerLostError(f"the connection to the worker at {peer} broke ({status.name}): {message}")
    return InternalError(f"the worker at {peer} answered {status.name}: {message}")


@asynccontextmanager
async def reporting_errors(
    context: grpc.aio.ServicerContext[Any, Any], logger: logging.Logger, call_id: str
) -> AsyncIterator[None]:
    """Wraps a handler: ``BatonError`` keeps its class on the wire, anything else is logged and becomes internal.

    Args:
        call_id: id of the call, as the router sent it.
    """
    try:
        yield
    except grpc.aio.BaseError:
        raise  # the call has ended already
    except Exception as error:  # noqa: BLE001 - a handler's last line of defence
        if not isinstance(error, BatonError):
            RequestLog(logger, request_id_of_call(call_id)).exception("a call failed unexpectedly")
        await abort_with(context, as_baton_error(error, call_id))
