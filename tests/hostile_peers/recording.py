"""A receiver of hand-offs that belongs to the hostile peer: it records transfers, or sends hostile replies."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc.aio

from baton.kv_transfer.base import Payload
from baton.kv_transfer.codec import decode_frame
from baton.kv_transfer.sender import METHOD, SERVICE
from baton.rpc.channel import PeerServer
from baton.rpc.wire import kv_pb2
from tests.credentials import CREDENTIALS

Part = tuple[kv_pb2.KVPart, Payload]


@dataclass(frozen=True, slots=True)
class RecordedTransfer:
    """What a prefill worker sent for one prompt."""

    reserve: kv_pb2.KVReserve
    parts: Sequence[Part]
    commit: kv_pb2.KVCommit


class FakeReceiver:
    """Answers transfers.

    Attributes:
        recorded: transfers by id, unless :attr:`scripts` has replies for them.
        scripts: replies to send instead of the right ones, by transfer id.
    """

    def __init__(self) -> None:
        self.address = ""
        self.recorded: dict[str, RecordedTransfer] = {}
        self.scripts: dict[str, Sequence[bytes]] = {}

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        server = PeerServer(CREDENTIALS)
        handler = grpc.stream_stream_rpc_method_handler(self._transfer)
        server.grpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
        self.address = server.bind("127.0.0.1")
        await server.start()
        try:
            yield
        finally:
            await server.stop(grace=0)

    async def _transfer(self, _: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        if (first := await context.read()) is grpc.aio.EOF:  # the sender has gone already
            return
        reserve = decode_frame(first)[0].reserve
        script = self.scripts.pop(reserve.transfer_id, None)
        if script is not None:
            for reply in script:
                await context.write(reply)
            return
        parts: list[Part] = []
        await _reply(context, reserved=kv_pb2.KVReserved(takes_draft=True))
        while (frame := await context.read()) is not grpc.aio.EOF:
            header, payload = decode_frame(frame)
            if header.HasField("part"):
                parts.append((header.part, bytes(payload)))
                num_bytes = sum(len(data) for _, data in parts)
                await _reply(context, received=kv_pb2.KVReceived(num_bytes=num_bytes))
            elif header.HasField("commit"):
                self.recorded[reserve.transfer_id] = RecordedTransfer(reserve, parts, header.commit)
                await _reply(context, committed=kv_pb2.KVCommitted(num_bytes=header.commit.num_bytes))
                return


async def _reply(context: grpc.aio.ServicerContext[Any, Any], **kind: Any) -> None:
    await context.write(kv_pb2.KVReply(**kind).SerializeToString())
