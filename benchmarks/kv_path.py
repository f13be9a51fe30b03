"""The hand-off's bandwidth, compared with that of a plain socket: ``python -m benchmarks.kv_path [--help]``.

Two processes on this machine. First as many bytes go from a buffer of a megabyte through a TCP connection into another
such buffer; then one transfer goes through the hand-off's own code (the paged cache is cut into parts, checksummed,
sent in gRPC messages, checked, and written into another paged cache), another one through a connection beside the gRPC
stream, another one through several, another one through memory that both processes see, with ``--nixl`` one through
memory that NIXL reads, with ``--int8`` one more in messages as int8, and with ``--tls`` one in messages over mutual
TLS, in turn.
Ratios are those of neighbours; medians. GB are those of the cache, however they travel.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from baton.core.errors import TransferError
from baton.kv_transfer.kv_transfer_config import MAX_CONNECTIONS
from baton.process.worker_environment import worker_variables
from benchmarks.ceilings import median_ratio
from benchmarks.kv_path_ends import BLOCK_SIZE, INT8, NIXL, NO_LIMITS, TLS, WAYS, Layout, Limits
from benchmarks.options import HelpFormatter, at_least, positive_number
from benchmarks.router_load.processes import Child
from cluster.cli.cli_certs import create_certificates

_ENDS = "benchmarks.kv_path_ends"
_NODE = "here"
_PEERS = {NIXL: "nixl_peer", TLS: "tls_peer"}
_WIDTH = 100
_LABELS = {
    "grpc": "KV in gRPC messages",
    "connected": "KV through a direct connection",
    "striped": "KV through several direct connections",
    "shared": "KV through shared memory",
    NIXL: "KV read by NIXL",
    INT8: "KV in gRPC messages as int8",
    TLS: "KV in gRPC messages, mutual TLS",
}


@dataclass(frozen=True, slots=True)
class HandOver:
    """The measurements of one transfer.

    Attributes:
        seconds: from the first call until the receiver has acknowledged everything.
        sender_cpu_s, receiver_cpu_s: CPU time of the two processes during the transfer.
        shared_share: share of the bytes that the receiver read from the sender's memory.
    """

    seconds: float
    sender_cpu_s: float
    receiver_cpu_s: float
    shared_share: float = 0.0


@dataclass(frozen=True, slots=True)
class Run:
    """Measurements that were taken one after the other.

    Attributes:
        tcp_s: duration of sending as many bytes through a plain socket.
        hand_overs: the hand-off by each way.
    """

    tcp_s: float
    hand_overs: Mapping[str, HandOver]


@dataclass(frozen=True, slots=True)
class Result:
    """The results of all runs."""

    layout: Layout
    part_bytes: int
    runs: tuple[Run, ...]
    limits: Limits = NO_LIMITS

    @property
    def ways(self) -> tuple[str, ...]:
        """The measured ways."""
        return tuple(self.runs[0].hand_overs)

    @property
    def figures(self) -> dict[str, float]:
        """Medians: GB/s of every way, their ratios to plain TCP, and seconds of CPU time per GB."""
        giga = self.layout.num_bytes / 1e9

        def values(way: str, name: str) -> list[float]:
            return [getattr(run.hand_overs[way], name) for run in self.runs]

        tcp, grpc = [run.tcp_s for run in self.runs], values("grpc", "seconds")
        figures = {"tcp_gb_per_s": giga / statistics.median(tcp)}
        for way in self.ways:
            seconds = values(way, "seconds")
            figures |= {
                f"{way}_gb_per_s": giga / statistics.median(seconds),
                f"{way}_of_tcp": median_ratio(tcp, seconds),
                f"{way}_of_grpc": median_ratio(grpc, seconds),
                f"{way}_sender_cpu_s_per_gb": statistics.median(values(way, "sender_cpu_s")) / giga,
                f"{way}_receiver_cpu_s_per_gb": statistics.median(values(way, "receiver_cpu_s")) / giga,
                f"{way}_shared_share": statistics.fmean(values(way, "shared_share")),
            }
        if "striped" in self.ways:
            figures["striped_of_connected"] = median_ratio(values("connected", "seconds"), values("striped", "seconds"))
        return figures


async def measure(
    layout: Layout,
    part_bytes: int,
    repeats: int,
    report: Callable[[Run], None] = lambda run: None,
    *,
    more_ways: Sequence[str] = (),
    limits: Limits = NO_LIMITS,
) -> Result:
    """Starts both processes and measures. The first transfer by each way is only checked, byte by byte.

    Args:
        more_ways: the additional ways to measure, out of NIXL, INT8 and TLS.
        limits: bandwidth limits of hand-offs; plain TCP is not limited.

    Raises:
        TransferError: the received bytes differ from the sent ones.
        InternalError: a process did not start, or ended.
    """
    runs = []
    ways = (*WAYS, *more_ways)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        create_certificates(folder, [_NODE], 1)
        receiver, at = await stack.enter_async_context(_end("receive", layout, part_bytes, ways, folder))
        sender, _ = await stack.enter_async_context(_end("send", layout, part_bytes, ways, folder, limits))
        peers = {way: at[_PEERS.get(way, "peer")] for way in ways}
        for way in ways:
            await _check_first(sender, receiver, peers[way], way)
        for number in range(repeats):
            tcp_s = (await _command(sender, {"kind": "tcp", "port": at["port"]}))["seconds"]
            await _command(receiver, {"kind": "rest"})
            hand_overs = {way: await _hand_over(sender, receiver, peers[way], way, number, layout) for way in ways}
            runs.append(Run(tcp_s, hand_overs))
            report(runs[-1])
    return Result(layout, part_bytes, tuple(runs), limits)


async def _hand_over(sender: Child, receiver: Child, peer: str, way: str, number: int, layout: Layout) -> HandOver:
    sent = await _command(sender, {"kind": way, "transfer_id": f"{way}-{number}", "peer": peer})
    taken = await _command(receiver, {"kind": "take", "transfer_id": f"{way}-{number}", "with_digest": False})
    return HandOver(sent["seconds"], sent["cpu_s"], taken["spent_s"], sent["shared_bytes"] / layout.num_bytes)


async def _check_first(sender: Child, receiver: Child, peer: str, way: str) -> None:
    await _command(sender, {"kind": way, "transfer_id": f"{way}-first", "peer": peer})
    taken = await _command(receiver, {"kind": "take", "transfer_id": f"{way}-first", "with_digest": True})
    if way == INT8:
        await _command(sender, {"kind": "round"})
    sent = await _command(sender, {"kind": "digest"})
    if taken["digest"] != sent["digest"]:
        raise TransferError("the received KV differs from the sent KV.")


@asynccontextmanager
async def _end(
    end: str, layout: Layout, part_bytes: int, ways: Sequence[str], folder: Path, limits: Limits = NO_LIMITS
) -> AsyncIterator[tuple[Child, dict[str, Any]]]:
    """A process, and its first message. ``folder`` has certificates."""
    sizes: dict[str, int | float | None] = {
        "--layers": layout.num_layers,
        "--kv-heads": layout.num_kv_heads,
        "--head-dim": layout.head_dim,
        "--tokens": layout.num_tokens,
        "--part-bytes": part_bytes,
        "--max-bytes-per-second": limits.bytes_per_second,
        "--max-bytes-per-second-each": limits.bytes_per_second_each,
        "--connections": limits.connections,
    }
    options = [text for name, value in sizes.items() if value is not None for text in (name, str(value))]
    if TLS in ways:
        options += ["--certificates", str(folder / _NODE)]
    child = await Child.start(_ENDS, [end, *options, "--ways", *ways], worker_variables())
    try:
        yield child, await child.receive()
    finally:
        await child.stop()


async def _command(child: Child, order: Mapping[str, Any]) -> dict[str, Any]:
    child.send(order)
    answer: dict[str, Any] = await child.receive()
    return answer


def show(result: Result) -> Table:
    """A table of the medians."""
    figures = result.figures
    layout = result.layout
    size = f"{layout.num_bytes / 1e9:.2f} GB, {layout.num_tokens} tokens, parts of {result.part_bytes / 2**20:g} MiB"
    table = Table("", "GB/s", "of TCP", "sender CPU, s/GB", "receiver CPU, s/GB", title=size, min_width=80)
    table.add_row("plain TCP", f"{figures['tcp_gb_per_s']:.2f}", "1.00", "", "")
    for way in result.ways:
        names = ("gb_per_s", "of_tcp", "sender_cpu_s_per_gb", "receiver_cpu_s_per_gb")
        table.add_row(_LABELS[way], *(f"{figures[f'{way}_{name}']:.2f}" for name in names))
    table.caption = (
        f"{figures['shared_shared_share']:.0%} of the bytes used shared memory, at "
        f"{figures['shared_of_grpc']:.2f} × the speed of messages; a connection had "
        f"{figures['connected_of_grpc']:.2f} × that speed, and {result.limits.connections} connections had "
        f"{figures['striped_of_connected']:.2f} × the speed of one. Medians of {len(result.runs)} alternating runs"
    )
    return table


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument(
        "--layers", type=at_least(1), default=32, help="number of layers of KV; the default is Llama-3.1-8B"
    )
    parser.add_argument("--kv-heads", type=at_least(1), default=8, help="number of KV heads per layer")
    parser.add_argument("--head-dim", type=at_least(1), default=128, help="size of a head")
    parser.add_argument(
        "--tokens", type=at_least(BLOCK_SIZE), default=8192, help="number of prompt tokens, a multiple of 16"
    )
    parser.add_argument("--part-bytes", type=at_least(4096), default=2**21, help="kv_transfer.part_bytes")
    parser.add_argument("--max-bytes-per-second", type=positive_number, help="kv_transfer.max_bytes_per_second")
    parser.add_argument(
        "--max-bytes-per-second-each",
        type=positive_number,
        help="bandwidth limit of a single KV connection",
    )
    parser.add_argument(
        "--connections",
        type=int,
        choices=range(2, MAX_CONNECTIONS + 1),
        metavar="N",
        default=NO_LIMITS.connections,
        help=f"number of connections in the run with several: 2 to {MAX_CONNECTIONS}",
    )
    parser.add_argument(
        "--nixl", action="store_true", help="also measure kv_transfer.transport: nixl, as to another host"
    )
    parser.add_argument("--int8", action="store_true", help="also measure kv_transfer.encoding: int8")
    parser.add_argument("--tls", action="store_true", help="also measure mutual TLS, as with `security`")
    parser.add_argument("--repeats", type=at_least(1), default=7, help="number of runs of each way, alternating")
    parser.add_argument("--json", type=Path, help="also write every run to this file")
    return parser


def main() -> None:
    parser = _parser()
    arguments = parser.parse_args()
    if arguments.tokens % BLOCK_SIZE:
        parser.error(f"--tokens is {arguments.tokens}, but it must be a multiple of {BLOCK_SIZE} above 0.")
    layout = Layout(arguments.layers, arguments.kv_heads, arguments.head_dim, arguments.tokens)
    given = ((NIXL, arguments.nixl), (INT8, arguments.int8), (TLS, arguments.tls))
    result = asyncio.run(
        measure(
            layout,
            arguments.part_bytes,
            arguments.repeats,
            more_ways=[way for way, is_given in given if is_given],
            limits=Limits(arguments.max_bytes_per_second, arguments.max_bytes_per_second_each, arguments.connections),
        )
    )
    Console(width=_WIDTH).print(show(result))
    if arguments.json:
        document = {"format": "baton-kv-path", **asdict(result), "figures": result.figures}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
