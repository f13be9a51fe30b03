"""One end of a hand-off in a process that a test kills: ``python -m … hold | export | send PEER | receive``.

The process prints one line when it should be killed. It does not import torch, so that it starts quickly.
"""

from __future__ import annotations

import asyncio
import sys
import threading

from baton.core.kv_spec import KVCacheSpec, LayerSpec
from baton.kv_transfer.base import PartHeader, Reservation, TransferOffer
from baton.kv_transfer.payload.inline import InlineReceivePath, InlineSendPath
from baton.kv_transfer.payload.nixl import NixlSendPath
from baton.kv_transfer.payload.segment import SharedSegment
from baton.kv_transfer.payload.shared_memory import SharedMemoryReceivePath, SharedMemorySendPath
from baton.kv_transfer.receiver import KVTransferService
from baton.kv_transfer.sender import GrpcKVTransport
from baton.rpc.channel import PeerServer
from tests.credentials import CREDENTIALS

PART_BYTES = 64 * 1024
NUM_PARTS = 1000
SPEC = KVCacheSpec("model", "float32", 4, (LayerSpec(1, 4, 4),))
CONTENT = bytes(range(256)) * (PART_BYTES // 256)


def offer(transfer_id: str) -> TransferOffer:
    return TransferOffer(transfer_id, SPEC, (1, 2, 3), 5.0)


async def send_shared(transport: GrpcKVTransport, peer: str, transfer_id: str, num_parts: int) -> int:
    """Sends parts only through shared memory; returns the acknowledged bytes."""
    stream = await transport.open(offer(transfer_id), peer)
    for _ in range(num_parts):
        buffer = stream.buffer(PART_BYTES)
        assert buffer is not None
        buffer.view[:] = CONTENT
        await stream.send(PartHeader(0, 1, 0, 1), buffer)
    return await stream.commit()


class StuckSink:
    """Accepts transfers but never finishes a write."""

    async def reserve(self, offer: TransferOffer) -> Reservation:
        return Reservation(0)

    async def write(self, transfer_id: str, header: PartHeader, payload: memoryview, checksum: int) -> None:
        say("writing")
        await asyncio.Event().wait()

    def place(self, transfer_id: str, header: PartHeader, num_bytes: int) -> None:
        return

    async def commit(self, transfer_id: str, draft_state: bytes | None = None) -> int:
        raise AssertionError("nothing was written")

    def abort(self, transfer_id: str, reason: str) -> None: ...


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def hold(segment: SharedSegment | None) -> None:
    assert segment is not None
    slot = segment.take(PART_BYTES)
    assert slot is not None
    slot.view[:] = CONTENT
    say(f"{segment.offer.SerializeToString().hex()} {slot.reference.SerializeToString().hex()}")
    threading.Event().wait()


async def receive() -> None:
    server = PeerServer(CREDENTIALS)
    KVTransferService(StuckSink(), [SharedMemoryReceivePath(), InlineReceivePath()]).add_to(server.grpc)
    address = server.bind("127.0.0.1")
    await server.start()
    say(address)
    await asyncio.Event().wait()


def main() -> None:
    what, *arguments = sys.argv[1:]
    if what == "hold":
        hold(SharedSegment(PART_BYTES))
    elif what == "export":
        memory = NixlSendPath(PART_BYTES)
        hold(memory.segment())
    elif what == "receive":
        asyncio.run(receive())
    else:
        transport = GrpcKVTransport([SharedMemorySendPath(PART_BYTES), InlineSendPath()], CREDENTIALS)
        asyncio.run(send_shared(transport, arguments[0], "killed", NUM_PARTS))


if __name__ == "__main__":
    main()
