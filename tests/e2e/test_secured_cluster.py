"""A cluster with certificates and API keys: what is on the wire, who is answered, who shares cached prefixes."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import grpc
import httpx
import psutil
import pytest

from cluster.cli.cli_certs import create_certificates
from tests.e2e.conftest import Settings, running_cluster
from tests.running_cluster import MODEL, RunningCluster

ALICE, BOB = "alice-key-0123456789", "bob-key-0123456789ab"
PROMPT = list(range(1000, 1200))
TOKEN_BYTES = b"".join(token.to_bytes(4, "little") for token in PROMPT[:16])


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    folder = tmp_path_factory.mktemp("certificates")
    create_certificates(folder, ["here"], 1)
    own = folder / "here"
    settings: Settings = {
        "dtype": "float32",
        "security": {"ca": str(own / "ca.pem"), "certificate": str(own / "node.pem"), "key": str(own / "node.key")},
        "kv_transfer": {"shared_memory": "off"},
        "router": {
            "port": 0,
            "api_keys": [{"name": "alice", "key": ALICE, "admin": True}, {"name": "bob", "key": BOB}],
        },
    }
    with running_cluster(settings) as cluster:
        yield cluster


def complete(cluster: RunningCluster, key: str, prompt: list[int], **parameters: object) -> dict:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 0, "return_token_ids": True, **parameters}
    headers = {"Authorization": f"Bearer {key}"}
    response = httpx.post(f"{cluster.endpoint}/v1/completions", json=body, headers=headers, timeout=120)
    assert response.status_code == 200, response.text
    return response.json()


def cached(answer: dict) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@contextlib.contextmanager
def capture() -> Iterator[bytearray]:
    """Collects every packet of the loopback interface; skips the test where this is not permitted."""
    try:
        packets = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(0x0003))
        packets.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 256 * 1024 * 1024)
        packets.bind(("lo", 0))
    except PermissionError:
        pytest.skip("capturing packets needs the capability NET_RAW")
    found, ended = bytearray(), threading.Event()
    packets.settimeout(0.1)

    def collect() -> None:
        while True:
            try:
                found.extend(packets.recv(65_535))
            except TimeoutError:
                if ended.is_set():
                    return

    thread = threading.Thread(target=collect)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()
        packets.close()


def send_in_plain_text(data: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        server, _ = listener.accept()
        with server:
            client.sendall(data)
            server.recv(len(data))


def test_no_tokens_are_on_the_wire(secured: RunningCluster) -> None:
    marker = bytes(range(200, 250))
    with capture() as packets:
        send_in_plain_text(marker)
        answer = complete(secured, ALICE, PROMPT)
    assert marker in packets, "the capture works"
    assert len(answer["choices"][0]["token_ids"]) == 4
    timeline = httpx.get(
        f"{secured.endpoint}/v1/requests/{answer['id']}/timeline", headers={"Authorization": f"Bearer {ALICE}"}
    ).json()
    assert timeline["attributes"]["kv_bytes"] > 0, "KV was handed over"
    assert timeline["attributes"]["kv_shared_bytes"] == 0
    assert TOKEN_BYTES not in packets


def test_keys_do_not_share_cached_prefixes(secured: RunningCluster) -> None:
    prompt = list(range(2000, 2200))
    assert cached(complete(secured, ALICE, prompt)) == 0
    assert cached(complete(secured, ALICE, prompt)) > 0
    assert cached(complete(secured, BOB, prompt)) == 0
    assert cached(complete(secured, BOB, prompt)) > 0
    assert cached(complete(secured, BOB, prompt, cache_salt="another user")) == 0


def test_only_the_endpoint_answers_strangers(secured: RunningCluster) -> None:
    pids = {worker["pid"] for worker in _workers(secured)}
    ports = {
        connection.laddr.port
        for pid in pids
        for connection in psutil.Process(pid).net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    addresses = {worker["address"] for worker in _workers(secured)}
    assert {int(address.rpartition(":")[2]) for address in addresses} <= ports
    for address in addresses:
        assert _greets_in_plain_text(address) in (b"", b"\x15"), "nothing, or a TLS alert"
        channel = grpc.insecure_channel(address)
        with channel, pytest.raises(grpc.RpcError):
            channel.unary_unary("/baton.v1.Worker/Ping")(b"", timeout=5)
    assert httpx.get(f"{secured.endpoint}/health").status_code == 200
    for path in ("/v1/models", "/v1/requests", "/admin/status"):
        assert httpx.get(f"{secured.endpoint}{path}").status_code == 401


def _workers(cluster: RunningCluster) -> list[dict]:
    headers = {"Authorization": f"Bearer {ALICE}"}
    pools = httpx.get(f"{cluster.endpoint}/admin/status", headers=headers, timeout=30).json()["pools"]
    return [worker for pool in pools.values() for worker in pool["workers"]]


def _greets_in_plain_text(address: str) -> bytes:
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(64))
        try:
            return connection.recv(1)
        except ConnectionResetError:
            return b""
