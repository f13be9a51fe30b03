"""The two processes of :mod:`benchmarks.kv_path`: ``python -m benchmarks.kv_path_ends send|receive …``.

Each holds an engine over a model whose KV is laid out like that of a large one and whose weights are next to nothing,
and the hand-off's own code: :class:`KVExporter` and the transport here, the gRPC service and :class:`KVImporter`
there. Nothing is computed; what a step would have left in the cache is random bytes. Both speak lines of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import math
import resource
import socket
import struct
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import uvloop
from transformers import AutoModelForCausalLM, LlamaConfig

from baton.core.chunk_budget import SchedulerLimits
from baton.core.drafts import ScheduledSequence
from baton.core.kv_spec import KVEncoding
from baton.core.request import Request, SamplingParams
from baton.engine.async_engine import AsyncEngine
from baton.engine.kv_cache.paged_cache import PagedKVCache
from baton.engine.models.model_loader import prepare_model
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.runner.options import RunnerOptions
from baton.kv_transfer.flow import Throttle
from baton.kv_transfer.kv_transfer_config import KVTransferConfig
from baton.kv_transfer.payload.base import SendPath
from baton.kv_transfer.payload.inline import InlineReceivePath, InlineSendPath
from baton.kv_transfer.payload.nixl import NixlReader, NixlReceivePath, NixlSendPath
from baton.kv_transfer.payload.shared_memory import SharedMemoryReceivePath, SharedMemorySendPath
from baton.kv_transfer.payload.sockets import SocketOption, SocketReceivePath, SocketSendPath
from baton.kv_transfer.receiver import KVTransferService
from baton.kv_transfer.sender import GrpcKVTransport
from baton.rpc.channel import PeerServer
from baton.rpc.credentials import ClusterSecret, PeerCredentials
from baton.rpc.node_certificates import NodeCertificates
from benchmarks.plain_tcp import send_plainly, serve_plainly
from decode_worker.kv_import import KVImporter
from prefill_worker.encoding_choice import EncodingChoice
from prefill_worker.kv_export import ExportSummary, KVExporter

BLOCK_SIZE = 16
WAYS = ("grpc", "connected", "striped", "shared")
"""The ways of KV: in gRPC messages, or, with gRPC for control, through one TCP connection, several connections, or the
sender's memory."""
INT8 = "int8"
"""Through gRPC messages, encoded as int8."""
NIXL = "nixl"
"""Read from the sender's memory through NIXL, which must be installed."""
TLS = "tls"
"""In gRPC messages over mutual TLS."""
_HOST = "127.0.0.1"
_SECRET = ClusterSecret(bytes(32))
_CREDENTIALS = PeerCredentials(_SECRET)
_TIMEOUT_S = 60.0
_SO_MAX_PACING_RATE = 47
"""A socket option of Linux; see socket(7)."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of the KV, in bfloat16, and its number of tokens."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_tokens: int

    @property
    def num_bytes(self) -> int:
        """The size of the keys and values of all layers and tokens."""
        return self.num_tokens * self.num_layers * self.num_kv_heads * self.head_dim * 2 * 2


@dataclass(frozen=True, slots=True)
class Limits:
    """Bandwidth limits that simulate a link.

    Attributes:
        bytes_per_second: limit of the whole hand-off; ``None`` means no limit.
        bytes_per_second_each: limit of each TCP connection of the hand-off; ``None`` means no limit.
        connections: maximum number of TCP connections.
    """

    bytes_per_second: float | None = None
    bytes_per_second_each: float | None = None
    connections: int = KVTransferConfig().connections

    @property
    def options(self) -> tuple[SocketOption, ...]:
        """Socket options by which the system limits the rate, as a network does by dropping packets."""
        if self.bytes_per_second_each is None:
            return ()
        rate = struct.pack("Q", math.ceil(self.bytes_per_second_each))
        return ((socket.SOL_SOCKET, _SO_MAX_PACING_RATE, rate),)


NO_LIMITS = Limits()


def encrypted(folder: Path) -> PeerCredentials:
    """Credentials with the certificate of a node; see ``baton certs``."""
    return PeerCredentials(
        _SECRET, NodeCertificates(*(folder / name for name in ("ca.pem", "node.pem", "node.key"))).current
    )


def make_runner(layout: Layout) -> ModelRunner:
    """A runner of a tiny model with this KV layout, whose cache has room for one transfer."""
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=8 * layout.num_kv_heads,
        intermediate_size=8,
        num_hidden_layers=layout.num_layers,
        num_attention_heads=layout.num_kv_heads,
        num_key_value_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        max_position_embeddings=layout.num_tokens + BLOCK_SIZE,
    )
    torch.manual_seed(0)  # the fingerprints of both sides must be equal
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval()
    num_blocks = -(-layout.num_tokens // BLOCK_SIZE) + 1
    return ModelRunner(prepare_model(model, "bfloat16"), num_blocks, BLOCK_SIZE, RunnerOptions(decoder="transformers"))


def make_engine(runner: ModelRunner) -> AsyncEngine:
    """An engine without prefix caching, so that every transfer sends all of its KV."""
    limits = SchedulerLimits(BLOCK_SIZE, 1, runner.loaded.max_model_len)
    return AsyncEngine(runner, limits, prefix_caching=False, num_threads=1)


class Sender:
    """The hand-off's parts of a prefill worker."""

    def __init__(
        self,
        layout: Layout,
        part_bytes: int,
        limits: Limits,
        ways: Sequence[str],
        credentials: PeerCredentials = _CREDENTIALS,
    ) -> None:
        self._layout = layout
        paths: dict[str, Callable[[], SendPath]] = {
            "connected": lambda: SocketSendPath(1, bytes_per_connection=1, options=limits.options),
            "striped": lambda: SocketSendPath(limits.connections, bytes_per_connection=1, options=limits.options),
            "shared": lambda: SharedMemorySendPath(part_bytes),
            NIXL: lambda: NixlSendPath(part_bytes),
        }
        self._engine = make_engine(make_runner(layout))
        # All ways share one cache. All exporters observe the engine's steps, but only one of them has a transfer.
        self._transports = {
            way: GrpcKVTransport(
                [*([paths[way]()] if way in paths else []), InlineSendPath()],
                credentials if way == TLS else _CREDENTIALS,
                Throttle(limits.bytes_per_second) if limits.bytes_per_second else None,
                _TIMEOUT_S,
            )
            for way in ways
        }
        self._exporters = {
            way: KVExporter(
                self._engine,
                transport,
                part_bytes,
                _TIMEOUT_S,
                choice=EncodingChoice(KVEncoding.INT8 if way == INT8 else KVEncoding.NATIVE),
            )
            for way, transport in self._transports.items()
        }
        self._request = Request("prompt", [1] * layout.num_tokens, SamplingParams())
        self._engine.block_holders.append(lambda: [self._request.block_ids])

    async def start(self) -> None:
        """Fills the cache with the KV to be sent."""
        generator = torch.Generator().manual_seed(1)
        for tensor in (*self.cache.keys, *self.cache.values):
            tensor.uniform_(-1.0, 1.0, generator=generator)
        self._engine.start()
        await self._engine.call(lambda: self._engine.blocks.grow(self._request, self._layout.num_tokens))

    async def stop(self) -> None:
        await self._engine.stop()
        for transport in self._transports.values():
            await transport.close()

    async def send(self, transfer_id: str, peer: str, way: str) -> ExportSummary:
        """Sends all of the KV by one way."""
        transfer = self._exporters[way].start(self._request, transfer_id, peer, {})
        await self._engine.call(self._pretend_to_compute)
        summary = await transfer
        if summary.num_bytes + summary.num_spared_bytes != self._layout.num_bytes:
            raise RuntimeError(f"{summary.num_bytes} of {self._layout.num_bytes} bytes were sent")
        return summary

    @property
    def cache(self) -> PagedKVCache:
        """The cache that holds the KV to be sent."""
        return self._engine.runner.cache

    def digest(self) -> str:
        """A digest of the KV to be sent."""
        return digest_of(self.cache, self._request)

    def round(self) -> None:
        """Rounds the KV to be sent as int8 encoding would."""
        self.cache.pass_through(self._request.block_ids, self._layout.num_tokens, KVEncoding.INT8)

    def _pretend_to_compute(self) -> None:
        """Simulates one step that computes the whole prompt. Runs in the engine's thread."""
        self._request.num_computed_tokens = 0
        plan = [ScheduledSequence(self._request, self._layout.num_tokens)]
        for exporter in self._exporters.values():
            exporter.scheduled(plan)
        self._request.num_computed_tokens = self._layout.num_tokens
        for exporter in self._exporters.values():
            exporter.computed(plan)


class Receiver:
    """The hand-off's parts of a decode worker."""

    def __init__(self, layout: Layout, ways: Sequence[str], credentials: PeerCredentials = _CREDENTIALS) -> None:
        self._credentials = credentials
        self._engine = make_engine(make_runner(layout))
        self._importer = KVImporter(self._engine, _TIMEOUT_S, encodings=(KVEncoding.INT8,))
        self._servers: list[PeerServer] = []
        self._service = KVTransferService(
            self._importer, [SharedMemoryReceivePath(), SocketReceivePath(), InlineReceivePath()]
        )
        self._nixl: KVTransferService | None = None
        if NIXL in ways:
            nixl = [NixlReceivePath(NixlReader(_TIMEOUT_S)), InlineReceivePath()]
            self._nixl = KVTransferService(self._importer, nixl)

    async def start(self) -> dict[str, str]:
        """The addresses to send to: one for NIXL, which does not use shared memory, one for TLS, one for all others."""
        self._engine.start()
        self._service.start(_HOST)
        peers = {"peer": await self._serve(self._service, _CREDENTIALS)}
        if self._credentials.certificates is not None:
            peers["tls_peer"] = await self._serve(self._service, self._credentials)
        if self._nixl is not None:
            peers["nixl_peer"] = await self._serve(self._nixl, _CREDENTIALS)
        return peers

    async def _serve(self, service: KVTransferService, credentials: PeerCredentials) -> str:
        server = PeerServer(credentials)
        service.add_to(server.grpc)
        address = server.bind(_HOST)
        await server.start()
        self._servers.append(server)
        return address

    async def stop(self) -> None:
        for server in self._servers:
            await server.stop(grace=0)
        await self._service.close()
        if self._nixl is not None:
            await self._nixl.close()
        await self._engine.stop()

    async def take(self, transfer_id: str, *, with_digest: bool) -> str:
        """Claims a committed transfer and frees its blocks; returns a digest of the received KV if wanted."""
        imported = await self._importer.claim(transfer_id)
        try:
            if not with_digest or imported.holder is None:
                return ""
            return digest_of(self._engine.runner.cache, imported.holder)
        finally:
            self._importer.release(imported)
            await self._engine.call(lambda: None)  # waits for the release


def digest_of(cache: PagedKVCache, request: Request) -> str:
    """A digest of all layers of a request's KV, in order of position."""
    digest = hashlib.blake2b(digest_size=16)
    for layer in range(len(cache.spec.layers)):
        num_tokens = len(request.block_ids) * BLOCK_SIZE
        digest.update(cache.export_bytes(request.block_ids, 0, num_tokens, range(layer, layer + 1)))
    return digest.hexdigest()


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def _answer_each(handle: Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]) -> None:
    """Answers each line of JSON on standard input with one line, until the input ends."""
    while line := await asyncio.to_thread(sys.stdin.readline):
        begun_s = _cpu_s()
        answer = await handle(json.loads(line))
        _reply({**answer, "cpu_s": _cpu_s() - begun_s})


def _reply(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


async def _send(
    layout: Layout, part_bytes: int, limits: Limits, ways: Sequence[str], credentials: PeerCredentials
) -> None:
    sender = Sender(layout, part_bytes, limits, ways, credentials)
    await sender.start()

    async def handle(order: dict[str, Any]) -> dict[str, Any]:
        if order["kind"] == "digest":
            return {"digest": await asyncio.to_thread(sender.digest)}
        if order["kind"] == "round":
            await asyncio.to_thread(sender.round)
            return {}
        if order["kind"] == "tcp":
            return {"seconds": await asyncio.to_thread(send_plainly, order["port"], layout.num_bytes)}
        summary = await sender.send(order["transfer_id"], order["peer"], order["kind"])
        return {"seconds": summary.seconds, "shared_bytes": summary.num_shared_bytes}

    try:
        _reply({"num_bytes": layout.num_bytes})
        await _answer_each(handle)
    finally:
        await sender.stop()


async def _receive(layout: Layout, ways: Sequence[str], credentials: PeerCredentials) -> None:
    receiver = Receiver(layout, ways, credentials)
    listener = socket.create_server((_HOST, 0))
    threading.Thread(target=serve_plainly, args=(listener,), daemon=True).start()
    last_cpu_s = 0.0

    async def handle(order: dict[str, Any]) -> dict[str, Any]:
        nonlocal last_cpu_s
        digest = ""
        if order["kind"] == "take":
            digest = await receiver.take(order["transfer_id"], with_digest=order["with_digest"])
        spent_s, last_cpu_s = _cpu_s() - last_cpu_s, _cpu_s()
        return {"digest": digest, "spent_s": spent_s}

    try:
        _reply({**await receiver.start(), "port": listener.getsockname()[1]})
        await _answer_each(handle)
    finally:
        listener.close()
        await receiver.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("end", choices=["send", "receive"])
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--kv-heads", type=int, required=True)
    parser.add_argument("--head-dim", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--part-bytes", type=int, required=True)
    parser.add_argument("--max-bytes-per-second", type=float)
    parser.add_argument("--max-bytes-per-second-each", type=float)
    parser.add_argument("--connections", type=int, default=NO_LIMITS.connections)
    parser.add_argument("--certificates", type=Path)
    parser.add_argument("--ways", nargs="+", required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # as in a worker, except for the engine's thread
    layout = Layout(arguments.layers, arguments.kv_heads, arguments.head_dim, arguments.tokens)
    credentials = encrypted(arguments.certificates) if arguments.certificates else _CREDENTIALS
    if arguments.end == "send":
        each = arguments.max_bytes_per_second_each
        limits = Limits(arguments.max_bytes_per_second, each, arguments.connections)
        uvloop.run(_send(layout, arguments.part_bytes, limits, arguments.ways, credentials))
    else:
        uvloop.run(_receive(layout, arguments.ways, credentials))


if __name__ == "__main__":
    main()
