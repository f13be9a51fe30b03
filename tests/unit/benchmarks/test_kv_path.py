"""The benchmark of the KV path with little KV in one process: every byte arrives, and the figures are consistent."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from baton.core.errors import BatonError
from benchmarks.kv_path import HandOver, Result, Run
from benchmarks.kv_path_ends import (
    INT8,
    NIXL,
    NO_LIMITS,
    TLS,
    WAYS,
    Layout,
    Limits,
    Receiver,
    Sender,
    encrypted,
)
from benchmarks.plain_tcp import send_plainly, serve_plainly
from cluster.cli.cli_certs import create_certificates

LAYOUT = Layout(num_layers=3, num_kv_heads=2, head_dim=8, num_tokens=80)
PART_BYTES = 1000


@pytest.fixture(params=[(*WAYS, INT8)])
async def ends(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Sender, Receiver, dict[str, str]]]:
    ways: tuple[str, ...] = request.param
    sender, receiver = Sender(LAYOUT, PART_BYTES, NO_LIMITS, ways), Receiver(LAYOUT, ways)
    await sender.start()
    peers = await receiver.start()
    try:
        yield sender, receiver, peers
    finally:
        await sender.stop()
        await receiver.stop()


async def test_all_kv_is_sent_in_every_run(ends: tuple[Sender, Receiver, dict[str, str]]) -> None:
    sender, receiver, peers = ends
    expected = sender.digest()
    ways = {"grpc": 0, "connected": 0, "striped": 0, "shared": LAYOUT.num_bytes}
    for way, shared_bytes in (*ways.items(), ("grpc", 0)):  # there is room for one alone
        summary = await sender.send("transfer", peers["peer"], way)
        assert summary.seconds > 0
        assert summary.num_shared_bytes == shared_bytes
        assert await receiver.take("transfer", with_digest=True) == expected


async def test_messages_over_tls_bring_all_kv(tmp_path: Path) -> None:
    create_certificates(tmp_path, ["here"], 1)
    credentials = encrypted(tmp_path / "here")
    sender, receiver = Sender(LAYOUT, PART_BYTES, NO_LIMITS, [TLS], credentials), Receiver(LAYOUT, [TLS], credentials)
    await sender.start()
    peers = await receiver.start()
    try:
        await sender.send("transfer", peers["tls_peer"], TLS)
        assert await receiver.take("transfer", with_digest=True) == sender.digest()
        with pytest.raises(BatonError):
            await sender.send("other", peers["peer"], TLS)
    finally:
        await sender.stop()
        await receiver.stop()


@pytest.mark.nixl
@pytest.mark.parametrize("ends", [(NIXL,)], indirect=True)
async def test_nixl_reads_all_kv(ends: tuple[Sender, Receiver, dict[str, str]]) -> None:
    sender, receiver, peers = ends
    summary = await sender.send("transfer", peers["nixl_peer"], NIXL)
    assert summary.num_shared_bytes == LAYOUT.num_bytes
    assert await receiver.take("transfer", with_digest=True) == sender.digest()


async def test_int8_sends_all_kv_rounded_in_fewer_bytes(ends: tuple[Sender, Receiver, dict[str, str]]) -> None:
    sender, receiver, peers = ends
    exact = sender.digest()
    summary = await sender.send("transfer", peers["peer"], INT8)
    assert summary.num_bytes == LAYOUT.num_bytes * (8 + 4) // 16
    found = await receiver.take("transfer", with_digest=True)
    sender.round()
    assert found == sender.digest() != exact


async def test_the_digest_detects_missing_data(ends: tuple[Sender, Receiver, dict[str, str]]) -> None:
    sender, receiver, peers = ends
    await sender.send("one", peers["peer"], "shared")
    before = sender.digest()
    sender.cache.values[-1].zero_()
    assert await receiver.take("one", with_digest=True) == before != sender.digest()


@pytest.mark.parametrize("num_bytes", [1, 1 << 20, (1 << 20) + 17])
async def test_a_plain_socket_receives_all_sent_bytes(num_bytes: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve_plainly, args=(listener,), daemon=True).start()
        for _ in range(2):
            assert await asyncio.to_thread(send_plainly, listener.getsockname()[1], num_bytes) > 0
        listener.shutdown(socket.SHUT_RDWR)


def test_figures_are_medians_and_ratios_compare_neighbours() -> None:
    layout = Layout(1, 1, 250, 1_000_000)
    assert layout.num_bytes == 1_000_000_000
    runs = (
        Run(0.2, {"grpc": HandOver(0.4, 0.3, 0.2), "shared": HandOver(0.1, 0.1, 0.2, 1.0)}),
        Run(0.4, {"grpc": HandOver(0.5, 0.5, 0.4), "shared": HandOver(0.5, 0.3, 0.1, 1.0)}),
        Run(0.25, {"grpc": HandOver(1.0, 0.4, 0.3), "shared": HandOver(0.25, 0.2, 0.3, 0.7)}),
    )
    runs = tuple(
        Run(run.tcp_s, {**run.hand_overs, "connected": HandOver(0.6, 0, 0), "striped": HandOver(0.3, 0, 0)})
        for run in runs
    )
    figures = Result(layout, 1 << 20, runs).figures
    assert figures["tcp_gb_per_s"] == pytest.approx(4.0)
    assert figures["grpc_gb_per_s"] == pytest.approx(2.0)
    assert figures["grpc_of_tcp"] == pytest.approx(0.5)
    assert figures["grpc_sender_cpu_s_per_gb"] == pytest.approx(0.4)
    assert figures["grpc_receiver_cpu_s_per_gb"] == pytest.approx(0.3)
    assert figures["shared_gb_per_s"] == pytest.approx(4.0)
    assert figures["shared_of_tcp"] == pytest.approx(1.0)
    assert figures["shared_of_grpc"] == pytest.approx(4.0)
    assert figures["shared_sender_cpu_s_per_gb"] == pytest.approx(0.2)
    assert figures["shared_receiver_cpu_s_per_gb"] == pytest.approx(0.2)
    assert figures["shared_shared_share"] == pytest.approx(0.9)
    assert figures["striped_of_connected"] == pytest.approx(2.0)
    assert "int8_gb_per_s" not in figures


def test_a_limit_per_connection_applies_to_its_socket() -> None:
    assert NO_LIMITS.options == ()
    with socket.socket() as paced:
        for option in Limits(bytes_per_second_each=3e9).options:  # more than 32 bits
            paced.setsockopt(*option)
            assert paced.getsockopt(*option[:2], 8) == (3_000_000_000).to_bytes(8, "little")


def test_int8_figures_count_the_bytes_of_the_cache() -> None:
    layout = Layout(1, 1, 250, 1_000_000)
    run = Run(0.2, {"grpc": HandOver(0.4, 0.3, 0.2), "int8": HandOver(0.25, 0.5, 0.1)})
    figures = Result(layout, 1 << 20, (run,)).figures
    assert figures["int8_gb_per_s"] == pytest.approx(4.0)
    assert figures["int8_of_grpc"] == pytest.approx(1.6)
    assert figures["int8_of_tcp"] == pytest.approx(0.8)
    assert figures["int8_sender_cpu_s_per_gb"] == pytest.approx(0.5)
    assert figures["int8_receiver_cpu_s_per_gb"] == pytest.approx(0.1)
