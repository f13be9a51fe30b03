"""Sends hostile calls to two workers, and judges the answers."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass

import grpc
import psutil
from google.protobuf.message import DecodeError

from baton.core.errors import error_classes
from baton.rpc.channel import CHANNEL_OPTIONS, ERROR_KEY
from baton.rpc.credentials import TOKEN_KEY
from baton.rpc.wire import kv_pb2, worker_pb2
from tests.credentials import CREDENTIALS, send_to
from tests.engine_runs import greedy
from tests.hostile_peers.calls import Call, Connection, HostileCall, Material, RawBytes
from tests.hostile_peers.recording import FakeReceiver, RecordedTransfer
from tests.integration.worker_pair import WorkerPair

_LONGEST_S = 20.0
"""A call without an answer after this time hangs."""
_RAW_S = 0.02
_OF_GRPC = {
    grpc.StatusCode.UNIMPLEMENTED: "Method not found",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "Received message larger than max",
}
"""Refusals of gRPC itself, by the text with which they begin."""


@dataclass(frozen=True, slots=True)
class Answer:
    """How a call ended.

    Attributes:
        code: the code of baton's error; empty without one.
    """

    status: grpc.StatusCode
    code: str = ""
    details: str = ""
    replies: Sequence[bytes] = ()

    @property
    def name(self) -> str:
        return self.code or str(self.status.name)


class HostilePeer:
    """A peer that has the secret of the cluster and may use it or not. Made by :func:`hostile_peer`.

    Its client is gRPC's one for threads: that for asyncio may lose the status of a call that ends during a write
    (grpc/grpc issue 36066).
    """

    def __init__(self, pair: WorkerPair, receiver: FakeReceiver, channels: dict[str, grpc.Channel]) -> None:
        self._pair = pair
        self._receiver = receiver
        self._channels = channels
        self._addresses = {"prefill": pair.prefill.address, "decode": pair.decode.address}
        self._ports = sorted(_listening_ports() - {_port(receiver.address)})

    async def record(self, prompts: Sequence[Sequence[int]]) -> Material:
        """Lets the prefill worker send the KV of the prompts here."""
        transfers = [await self._recorded(f"recorded-{number}", prompt) for number, prompt in enumerate(prompts)]
        return Material.of(transfers, self._receiver.address, self._pair.decode.address)

    async def _recorded(self, transfer_id: str, prompt: Sequence[int]) -> RecordedTransfer:
        message = self._pair.prefill_request(transfer_id, prompt, greedy(2), transfer_id)
        send_to(message.handoff, self._receiver.address)
        events = [event async for event in self._pair.prefill.client.prefill(message, _LONGEST_S)]
        assert not events[-1].handoff.error_code, events[-1]
        return self._receiver.recorded[transfer_id]

    async def send(self, calls: Sequence[HostileCall]) -> list[Answer]:
        """Makes the calls at the same time."""
        for call in calls:
            if isinstance(call, Call) and call.script is not None:
                self._receiver.scripts[call.script[0]] = call.script[1]
        return await asyncio.gather(*(asyncio.to_thread(self._make, call) for call in calls))

    def _make(self, call: HostileCall) -> Answer:
        return self._call(call) if isinstance(call, Call) else self._connect(call)

    def _connect(self, raw: RawBytes) -> Answer:
        address = ("127.0.0.1", self._ports[raw.port % len(self._ports)])
        with suppress(OSError), socket.create_connection(address) as connection:
            connection.sendall(raw.data)
            connection.settimeout(_RAW_S)
            while connection.recv(4096):
                pass
        return Answer(grpc.StatusCode.OK)

    def _call(self, call: Call) -> Answer:
        address = self._addresses[call.worker]
        tokens = {"right": CREDENTIALS.call_metadata(address), "wrong": ((TOKEN_KEY, "0" * 64),), "none": ()}
        replies: list[bytes] = []
        has_reply = threading.Event()
        with ExitStack() as connections:

            def messages() -> Iterator[bytes]:
                for index, message in enumerate(call.messages):
                    yield message
                    if index == 0 and call.connections:
                        has_reply.wait(_LONGEST_S)
                        _open(call.connections, address, replies, connections)

            rpc = self._channels[call.worker].stream_stream(call.method)(
                messages(), timeout=_LONGEST_S, metadata=tokens[call.token]
            )
            if call.cancel_after_s is not None:
                threading.Timer(call.cancel_after_s, rpc.cancel).start()
            try:
                for reply in rpc:
                    replies.append(reply)
                    has_reply.set()
            except grpc.RpcError:
                pass  # the status says it
            has_reply.set()
            metadata = {str(key): str(value) for key, value in rpc.trailing_metadata() or ()}
            return Answer(rpc.code(), metadata.get(ERROR_KEY, ""), rpc.details() or "", replies)


@asynccontextmanager
async def hostile_peer(pair: WorkerPair) -> AsyncIterator[HostilePeer]:
    """A peer of both workers."""
    receiver = FakeReceiver()
    async with receiver.serving():
        with ExitStack() as channels:
            yield HostilePeer(
                pair,
                receiver,
                {
                    name: channels.enter_context(grpc.insecure_channel(worker.address, options=CHANNEL_OPTIONS))
                    for name, worker in (("prefill", pair.prefill), ("decode", pair.decode))
                },
            )


def problem(call: HostileCall, answer: Answer) -> str | None:
    """What is wrong with an answer to a hostile call; ``None`` if it is a success or a typed refusal."""
    if isinstance(call, RawBytes):
        return None
    if call.cancel_after_s is not None and answer.status is grpc.StatusCode.CANCELLED:
        return None
    said = f"{call.method} answered {answer.status.name} {answer.code}: {answer.details[:300]}"
    if call.token != "right":
        is_refused = answer.status is grpc.StatusCode.UNAUTHENTICATED and not answer.replies
        return None if is_refused else f"without a token, {said}"
    if not answer.details.isprintable():
        return f"unprintable text could forge a line of a log: {said!r}"
    if answer.code:
        known = error_classes().get(answer.code)
        is_typed = known is not None and known.grpc_status == answer.status.name and answer.code != "internal_error"
        return None if is_typed else said
    if answer.status is not grpc.StatusCode.OK:
        return None if answer.details.startswith(_OF_GRPC.get(answer.status, "nothing")) else said
    return _handoff_problem(answer.replies) if call.script is None else None


def _handoff_problem(replies: Sequence[bytes]) -> str | None:
    for reply in replies:
        with suppress(DecodeError):
            result = worker_pb2.PrefillEvent.FromString(reply).handoff
            if result.error_code == "internal_error":
                return f"a hand-off ended with {result.error_code}: {result.error_message}"
    return None


def _open(connections: Sequence[Connection], address: str, replies: Sequence[bytes], opened: ExitStack) -> None:
    """Opens connections for KV, if the first reply offers them."""
    offered = kv_pb2.KVReply.FromString(replies[0]).reserved.connection if replies else kv_pb2.KVConnection()
    for connection in connections if offered.port else ():
        with suppress(OSError):
            made = socket.create_connection((address.rpartition(":")[0], offered.port))
            opened.enter_context(made).sendall(
                (offered.ticket if connection.ticket is None else connection.ticket) + connection.data
            )


def _listening_ports() -> set[int]:
    connections = psutil.Process().net_connections("tcp")
    return {found.laddr.port for found in connections if found.status == psutil.CONN_LISTEN}


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])
