"""Errors keep their class and message across a gRPC connection."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc
import grpc.aio
import pytest
from ray.exceptions import RayTaskError

from baton.core.errors import (
    BatonError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    OutOfMemoryError,
    OverloadedError,
    TransferError,
    WorkerLostError,
    error_classes,
)
from baton.rpc import channel as channel_module
from baton.rpc.channel import PeerServer, create_channel, error_from_rpc, reporting_errors
from baton.rpc.wire import worker_pb2
from tests.credentials import CREDENTIALS
from tests.waiting import TIMEOUT_S

logger = logging.getLogger(__name__)

Handler = Callable[[bytes, Any], Awaitable[bytes]]


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[tuple[PeerServer, Any]]:
    server = PeerServer(CREDENTIALS)
    methods = {"Call": grpc.unary_unary_rpc_method_handler(handler)}
    server.grpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", methods),))
    address = server.bind("127.0.0.1")
    await server.start()
    channel = create_channel(address, CREDENTIALS)
    try:
        yield server, partial(channel.unary_unary("/test.Service/Call"), metadata=CREDENTIALS.call_metadata(address))
    finally:
        await channel.close()
        await server.stop(grace=0)


async def error_of(call: Awaitable[bytes]) -> BatonError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return error_from_rpc(caught.value, "the peer")


def raising(error: Exception) -> Handler:
    async def handle(request: bytes, context: Any) -> bytes:
        async with reporting_errors(context, logger, "req-1/abc"):
            raise error
        return b""

    return handle


@pytest.mark.parametrize("cls", error_classes().values(), ids=lambda cls: cls.__name__)
async def test_every_error_class_round_trips(cls: type[BatonError]) -> None:
    async with serving(raising(cls("what was wrong — größer als 5"))) as (_, call):
        error = await error_of(call(b""))
    assert type(error) is cls
    assert error.message == "what was wrong — größer als 5"


async def test_a_class_derived_from_an_error_by_ray_is_not_mistaken_for_it() -> None:
    cause = TransferError("the cable")
    derived = RayTaskError("task", "traceback", cause).as_instanceof_cause()
    assert isinstance(derived, TransferError)
    assert error_classes()[TransferError.code] is TransferError


async def test_retry_after_round_trips() -> None:
    async with serving(raising(OverloadedError("busy", retry_after_s=7.5))) as (_, call):
        error = await error_of(call(b""))
    assert isinstance(error, OverloadedError)
    assert error.retry_after_s == 7.5


@pytest.mark.parametrize("message", ["x" * 100_000, "ü€𝄞" * 30_000])
async def test_a_long_message_is_shortened_and_keeps_the_connection(message: str) -> None:
    async with serving(raising(TransferError(message))) as (_, call):
        error = await error_of(call(b""))
    assert isinstance(error, TransferError)
    assert message.startswith(error.message.removesuffix("…"))
    assert len(error.message) > 200


async def test_an_internal_fault_is_logged_and_becomes_internal(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(raising(KeyError("what the client shall not see"))) as (_, call):
        error = await error_of(call(b""))
    assert type(error) is InternalError
    assert "shall not see" not in error.message
    assert "KeyError" not in error.message
    assert "request id req-1." in error.message
    [record] = [record for record in caplog.records if record.name == __name__]
    assert vars(record)["request_id"] == "req-1"
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], KeyError)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")])
async def test_a_lack_of_memory_has_a_name_of_its_own(error: Exception) -> None:
    async with serving(raising(error)) as (_, call):
        found = await error_of(call(b""))
    assert isinstance(found, OutOfMemoryError)
    assert found.http_status == 503
    assert "no memory for this request" in found.message


async def test_expected_errors_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(raising(TransferError("as foreseen"))) as (_, call):
        await error_of(call(b""))
    assert [record for record in caplog.records if record.name == __name__] == []


async def test_a_call_that_takes_too_long_is_a_deadline_error() -> None:
    async def sleep(request: bytes, context: Any) -> bytes:
        await asyncio.sleep(10)
        return b""

    async with serving(sleep) as (_, call):
        assert isinstance(await error_of(call(b"", timeout=0.1)), DeadlineError)


async def test_an_unreachable_server_is_a_lost_worker() -> None:
    channel = create_channel("127.0.0.1:1", CREDENTIALS)
    error = await error_of(channel.unary_unary("/test.Service/Call")(b"", timeout=TIMEOUT_S))
    await channel.close()
    assert isinstance(error, WorkerLostError)
    assert "the peer" in error.message


async def test_a_server_that_stops_during_a_call_is_a_lost_worker() -> None:
    async def sleep(request: bytes, context: Any) -> bytes:
        await asyncio.sleep(10)
        return b""

    async with serving(sleep) as (server, call):
        pending = asyncio.ensure_future(error_of(call(b"")))
        await asyncio.sleep(0.05)
        await server.stop(grace=0)
        assert isinstance(await pending, WorkerLostError)


async def test_an_unimplemented_method_is_not_a_lost_worker() -> None:
    server = PeerServer(CREDENTIALS)
    address = server.bind("127.0.0.1")
    await server.start()
    channel = create_channel(address, CREDENTIALS)
    error = await error_of(channel.unary_unary("/test.Service/Other")(b"", metadata=CREDENTIALS.call_metadata(address)))
    await channel.close()
    await server.stop(grace=0)
    assert type(error) is InternalError
    assert "UNIMPLEMENTED" in error.message


@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream", "generator"])
async def test_requests_that_cannot_be_parsed_get_a_typed_refusal(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    handled: list[worker_pb2.AbandonRequest] = []

    async def answer(message: worker_pb2.AbandonRequest, context: Any) -> bytes:
        handled.append(message)
        return b"answer"

    async def write(message: worker_pb2.AbandonRequest, context: Any) -> None:
        await context.write(await answer(message, context))

    async def generate(message: worker_pb2.AbandonRequest, context: Any) -> AsyncIterator[bytes]:
        yield await answer(message, context)

    parse = worker_pb2.AbandonRequest.FromString
    handler = {
        "unary_unary": grpc.unary_unary_rpc_method_handler(answer, parse),
        "unary_stream": grpc.unary_stream_rpc_method_handler(write, parse),
        "generator": grpc.unary_stream_rpc_method_handler(generate, parse),
    }[kind]
    server = PeerServer(CREDENTIALS)
    server.grpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", {"Call": handler}),))
    address = server.bind("127.0.0.1")
    await server.start()
    channel = create_channel(address, CREDENTIALS)
    call = partial(channel.unary_stream("/test.Service/Call"), metadata=CREDENTIALS.call_metadata(address))
    try:
        right = worker_pb2.AbandonRequest(transfer_id="t")
        assert [reply async for reply in call(right.SerializeToString())] == [b"answer"]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(call(b"\xff")))
    finally:
        await channel.close()
        await server.stop(grace=0)
    error = error_from_rpc(caught.value, "the peer")
    assert isinstance(error, InvalidRequestError)
    assert error.message == "A request of /test.Service/Call cannot be parsed."
    assert handled == [right]
    assert not [record for record in caplog.records if not record.name.startswith("asyncio")]  # of earlier tests' loops


async def test_a_server_closes_the_connection_of_a_peer_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer is behind a link that was cut: nothing comes from it any more, not even the end of its connection."""
    sooner = {"grpc.keepalive_time_ms": 200, "grpc.keepalive_timeout_ms": 200}
    options = [(name, sooner.pop(name, value)) for name, value in channel_module.SERVER_OPTIONS]
    assert not sooner, "without its own keepalive, a server would keep it for two hours"
    monkeypatch.setattr(channel_module, "SERVER_OPTIONS", [*options, ("grpc.http2.ping_timeout_ms", 200)])
    server = PeerServer(CREDENTIALS)
    host, port = server.bind("127.0.0.1").rsplit(":", 1)
    await server.start()
    try:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")  # a preface and empty settings
        async with asyncio.timeout(TIMEOUT_S):
            while await reader.read(1024):
                pass
        writer.close()
    finally:
        await server.stop(grace=0)
