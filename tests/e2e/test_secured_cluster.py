"""A cluster with certificates and API keys: what is on the wire, who is answered, who shares cached prefixes."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import grpc
import httpx
import pytest

from cluster.cli.cli_certs import create_certificates
from tests.certificates import Files, self_signed
from tests.e2e.conftest import Settings, running_cluster
from tests.e2e.strangers import HEALTH, NODES, answers, listening_ports, status_of
from tests.running_cluster import MODEL

ALICE, BOB = "alice-key-0123456789", "bob-key-0123456789ab"
PROMPT = list(range(1000, 1200))
TOKEN_BYTES = b"".join(token.to_bytes(4, "little") for token in PROMPT[:16])


ROUTER, WORKER, CONTROLLER = "ray::RouterActor", "ray::WorkerActor", "ray::Controller"
GCS, RAYLET = "gcs_server", "raylet"
ANSWERED = {
    (ROUTER, "HTTPS GET /health"),
    *((program, f"gRPC {HEALTH}") for program in (ROUTER, WORKER, CONTROLLER, GCS, RAYLET, "driver")),
}
"""All that a stranger is answered, by program, apart from Ray's :data:`MONITOR`. SECURITY.md has the reasons."""
MONITOR = "monitor.py"
"""Serves metrics of Ray's autoscaler under every path, at a fixed port that another cluster may have taken."""


@dataclass(frozen=True)
class SecuredCluster:
    endpoint: str
    tls: Files
    authority: bytes

    def request(self, method: str, path: str, key: str | None, **options: object) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        trusted = ssl.create_default_context(cafile=str(self.tls.certificate))
        trusted.verify_flags &= ~ssl.VERIFY_X509_STRICT
        return httpx.request(method, self.endpoint + path, headers=headers, verify=trusted, timeout=120, **options)

    def get(self, path: str, key: str | None = ALICE) -> httpx.Response:
        return self.request("GET", path, key)


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredCluster]:
    folder = tmp_path_factory.mktemp("certificates")
    create_certificates(folder, ["here"], 1)
    own, endpoint = folder / "here", self_signed(folder / "endpoint")
    settings: Settings = {
        "dtype": "float32",
        "security": {"ca": str(own / "ca.pem"), "certificate": str(own / "node.pem"), "key": str(own / "node.key")},
        "kv_transfer": {"shared_memory": "off"},
        "router": {
            "port": 0,
            "tls": endpoint.config,
            "api_keys": [{"name": "alice", "key": ALICE, "admin": True}, {"name": "bob", "key": BOB}],
        },
    }
    with running_cluster(settings) as cluster:
        assert cluster.endpoint.startswith("https://")
        yield SecuredCluster(cluster.endpoint, endpoint, (own / "ca.pem").read_bytes())


def complete(cluster: SecuredCluster, key: str, prompt: list[int], **parameters: object) -> dict:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 0, "return_token_ids": True, **parameters}
    response = cluster.request("POST", "/v1/completions", key, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def cached_by_both(cluster: SecuredCluster, key: str, prompt: list[int], **parameters: object) -> tuple[int, int]:
    """Cached tokens of a prompt, as the answer has them, and as the decode worker had at the hand-off."""
    answer = complete(cluster, key, prompt, **parameters)
    timeline = cluster.get(f"/v1/requests/{answer['id']}/timeline", key).json()
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"], timeline["attributes"]["kv_cached_tokens"]


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


def test_no_tokens_are_on_the_wire(secured: SecuredCluster) -> None:
    marker = bytes(range(200, 250))
    with capture() as packets:
        send_in_plain_text(marker)
        answer = complete(secured, ALICE, PROMPT)
    assert marker in packets, "the capture works"
    assert len(answer["choices"][0]["token_ids"]) == 4
    timeline = secured.get(f"/v1/requests/{answer['id']}/timeline").json()
    assert timeline["attributes"]["kv_bytes"] > 0, "KV was handed over"
    assert timeline["attributes"]["kv_shared_bytes"] == 0
    assert TOKEN_BYTES not in packets


def test_keys_do_not_share_cached_prefixes(secured: SecuredCluster) -> None:
    prompt = list(range(2000, 2200))
    assert cached_by_both(secured, ALICE, prompt) == (0, 0)
    assert min(cached_by_both(secured, ALICE, prompt)) > 0
    assert cached_by_both(secured, BOB, prompt) == (0, 0)
    assert min(cached_by_both(secured, BOB, prompt)) > 0
    assert cached_by_both(secured, BOB, prompt, cache_salt="another user") == (0, 0)


def test_strangers_are_answered_on_no_port_but_for_the_health(secured: SecuredCluster) -> None:
    ports = listening_ports(os.getpid())
    of_workers = {int(worker["address"].rpartition(":")[2]) for worker in workers(secured)}
    assert of_workers < {port.number for port in ports if port.program == WORKER}
    assert {ROUTER, WORKER, CONTROLLER, GCS, RAYLET} <= {port.program for port in ports}
    assert grpc.StatusCode.UNAUTHENTICATED in {status_of(port, NODES) for port in ports if port.program == GCS}
    found = [(port, answer) for port in ports for answer in answers(port, secured.authority)]
    assert {(port.program, answer) for port, answer in found if port.program != MONITOR} == ANSWERED, found
    assert all(answer.startswith("HTTP GET") for port, answer in found if port.program == MONITOR), found
    assert of_workers.isdisjoint(port.number for port, _ in found)


def test_the_key_decides_what_the_endpoint_answers(secured: SecuredCluster) -> None:
    for path in ("/", "/ready", "/metrics", "/v1/models", "/v1/requests", "/admin/status"):
        assert secured.get(path, key=None).status_code == 401, path
        assert secured.get(path).status_code == 200, path
    assert secured.get("/health", key=None).status_code == 200
    assert secured.get("/admin/status", key=BOB).status_code == 403


def test_commands_trust_the_certificate_that_is_named(secured: SecuredCluster) -> None:
    command = [sys.executable, "-m", "cluster.cli.cli", "status", "--endpoint", secured.endpoint]
    environment = {**os.environ, "BATON_API_KEY": ALICE}
    refused = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert refused.returncode != 0
    assert "--ca" in refused.stderr
    command += ["--ca", str(secured.tls.certificate)]
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert shown.returncode == 0, shown.stderr
    assert "prefill-1" in shown.stdout


def workers(cluster: SecuredCluster) -> list[dict]:
    pools = cluster.get("/admin/status").json()["pools"]
    return [worker for pool in pools.values() for worker in pool["workers"]]
