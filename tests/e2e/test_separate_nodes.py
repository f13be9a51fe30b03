"""A cluster of three hosts with addresses and firewalls of their own: head, prefill node and decode node.

The hosts are joined by `baton node`, and accept only what docs/machines.md lists. The last tests cut a node off, and
end it.
"""

from __future__ import annotations

import json
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.engine_runs import build_engine, run, tokens_of
from tests.namespaces import Host, hosts, why_no_firewall, why_no_namespaces
from tests.ranked_models import PROMPTS as LONG_AND_SHORT
from tests.ranked_models import Build, build_with_draft, sampled, save_servable

PROBLEM = why_no_namespaces()
NO_FIREWALL = PROBLEM or why_no_firewall()
pytestmark = pytest.mark.skipif(bool(PROBLEM), reason=PROBLEM)
ROOT = Path(__file__).parents[2]
PROMPTS = LONG_AND_SHORT[::3]
PARAMS = sampled(len(PROMPTS), 20)
RAY_PORT, HTTP_PORT = 6379, 8000
START_S = 240.0
WORKER_PORTS = "20000-20009"
RAY_PORTS = {
    "head": [str(RAY_PORT), str(RAY_PORT + 1), str(RAY_PORT + 2), "10002:10999"],
    "worker": [str(RAY_PORT + 1), str(RAY_PORT + 2), "10002:10999"],
}
"""Those that docs/machines.md says to open."""
BATON = [sys.executable, "-c", "from cluster.cli.command import main; main()"]
SECRET = f"hf_{secrets.token_hex(16)}"
RAY_VARIABLES = {
    # A node is declared dead after some seconds instead of half a minute.
    "RAY_health_check_initial_delay_ms": "3000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "4",
}
CALL = """
import sys, httpx
method, url, body = sys.argv[1:]
answer = httpx.request(method, url, content=body or None, headers={"content-type": "application/json"}, timeout=60)
print(answer.text)
sys.exit(answer.status_code != 200)
"""


@dataclass
class SeparateNodes:
    """A cluster with one worker in each pool, on nodes of their own."""

    head: Host
    prefill: Host
    decode: Host
    logs: Path
    joined: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Calls the endpoint from the head's host."""
        url = f"http://{self.head.address}:{HTTP_PORT}{path}"
        content = json.dumps(body) if body else ""
        return json.loads(self.head.run([sys.executable, "-c", CALL, method, url, content], 90))

    def start(self, host: Host, arguments: list[str]) -> subprocess.Popen[bytes]:
        """Starts baton on a host."""
        variables = self.variables | ({"HF_TOKEN": SECRET} if arguments[0] == "up" else {})
        return host.start([*BATON, *arguments], self.log_of(host, arguments[0]), variables)

    @property
    def variables(self) -> dict[str, str]:
        return {**RAY_VARIABLES, "RAY_AUTH_TOKEN_PATH": str(self.logs / "token"), "PYTHONPATH": str(ROOT)}

    def log_of(self, host: Host, command: str) -> Path:
        return self.logs / f"{host.namespace}-{command}.log"

    def join(self, name: str) -> None:
        """Makes a host a node for a pool."""
        host: Host = getattr(self, name)
        arguments = ["node", "join", f"{self.head.address}:{RAY_PORT}", "--pool", name, "--cpus", "8"]
        self.joined[name] = self.start(host, arguments)
        self.wait_for(lambda: "has joined" in self.log_of(host, "node").read_text(), name)

    def wait_for(self, condition: Callable[[], Any], what: str) -> None:
        """Waits until a condition is true, and meanwhile takes its errors for a no.

        Raises:
            TimeoutError: it takes too long, or a program of a host ends.
        """
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and not any(host.has_ended() for host in self.all):
            try:
                if condition():
                    return
            except (subprocess.SubprocessError, ValueError):
                pass
            time.sleep(0.5)
        texts = [f"{log.name}:\n{log.read_text()[-2000:]}" for log in sorted(self.logs.glob("*.log"))]
        raise TimeoutError(f"{what} did not start\n" + "\n".join(texts))

    @property
    def all(self) -> tuple[Host, ...]:
        return self.head, self.prefill, self.decode

    def tokens(self, index: int) -> list[int]:
        """The tokens of the answer to a prompt."""
        return list(self.call("POST", "/v1/completions", self.request(index))["choices"][0]["token_ids"])

    def request(self, index: int) -> dict[str, Any]:
        own = PARAMS[index]
        return {
            "model": "tiny",
            "prompt": PROMPTS[index],
            "max_tokens": own.max_tokens,
            "temperature": own.temperature,
            "seed": own.seed,
            "return_token_ids": True,
        }

    def num_in_flight(self) -> int:
        return int(self.call("GET", "/admin/status")["requests"]["in_flight"])

    def live_pids(self, pool: str) -> list[int | None]:
        """The processes of the pool's workers that are not dead; ``None`` for one that has not started."""
        workers = self.call("GET", "/admin/status")["pools"][pool]["workers"]
        return [worker.get("pid") for worker in workers if worker["state"] != "dead"]

    def ready_pid(self, pool: str) -> int | None:
        """The process of the pool's only worker, if it is ready."""
        workers = self.call("GET", "/admin/status")["pools"][pool]["workers"]
        ready = [worker["pid"] for worker in workers if worker["state"] == "ready"]
        return ready[0] if len(ready) == 1 else None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_servable(tmp_path_factory.mktemp("model") / "tiny")


@dataclass(frozen=True)
class Reference:
    """What one engine computes."""

    tokens: list[list[int]]
    kv_bytes: int


@pytest.fixture(scope="module")
def expected(folder: Path) -> Reference:
    runner = build_with_draft(Build(str(folder)), None)[0]
    tokens = tokens_of(run(build_engine(runner), PROMPTS, PARAMS))
    return Reference(tokens, sum(map(len, PROMPTS)) * runner.spec.bytes_per_token)


@pytest.fixture(scope="module")
def nodes(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeparateNodes]:
    logs = tmp_path_factory.mktemp("logs")
    with hosts(("head", "prefill", "decode")) as found:
        cluster = SeparateNodes(**found, logs=logs)
        if not NO_FIREWALL:
            cluster.head.accept_only([*RAY_PORTS["head"], str(HTTP_PORT)])
            for host in (cluster.prefill, cluster.decode):
                host.accept_only([*RAY_PORTS["worker"], WORKER_PORTS.replace("-", ":")])
        cluster.start(cluster.head, ["node", "start", "--address", f"{cluster.head.address}/24"])
        cluster.wait_for(lambda: "the head is ready" in cluster.log_of(cluster.head, "node").read_text(), "the head")
        for name in ("prefill", "decode"):
            cluster.join(name)
        config = logs / "config.yaml"
        config.write_text(yaml.safe_dump(configuration(folder, cluster.head.address)))
        cluster.start(cluster.head, ["up", "-c", str(config)])
        cluster.wait_for(lambda: cluster.call("GET", "/ready"), "the cluster")
        yield cluster


def configuration(folder: Path, address: str) -> dict[str, Any]:
    pool = {"kv_blocks": 512, "chunk_tokens": 32}
    return {
        "model": str(folder),
        "served_model_name": "tiny",
        "dtype": "float32",
        "engine": {"block_size": 4},
        "ray": {"address": f"{address}:{RAY_PORT}", "start_timeout_s": START_S},
        "router": {"host": address, "port": HTTP_PORT},
        "network": {"ports": WORKER_PORTS},
        "prefill": {**pool, "tensor_parallel": 2},
        "decode": {**pool, "tensor_parallel": 1},
        "kv_transfer": {"shared_memory": "off"},  # the hosts are one machine after all
        "routing": {"local_prefill": "never"},
    }


def test_the_nodes_have_no_problem(nodes: SeparateNodes) -> None:
    settings = [f"{name}={value}" for name, value in nodes.variables.items()]
    check = ["env", *settings, *BATON, "check", "--nodes", "--json", "-c", str(nodes.logs / "config.yaml")]
    report = json.loads(nodes.head.run(check, START_S))
    assert [problem for problem in report["problems"] if problem["is_fatal"]] == []
    assert {(link["from"], link["to"]) for link in report["links"]} == {(nodes.prefill.address, nodes.decode.address)}
    assert report["links"][0]["bytes_per_s"] > 0
    pools = {node["name"]: node["pools"] for node in report["nodes"]}
    assert pools == {nodes.prefill.address: ["prefill"], nodes.decode.address: ["decode"]}


def test_kv_of_a_divided_worker_crosses_the_link(nodes: SeparateNodes, expected: Reference) -> None:
    before = nodes.prefill.sent_bytes()
    assert [nodes.tokens(index) for index in range(len(PROMPTS))] == expected.tokens
    assert nodes.prefill.sent_bytes() - before >= expected.kv_bytes


def test_workers_are_on_the_nodes_of_their_pool(nodes: SeparateNodes) -> None:
    pools = nodes.call("GET", "/admin/status")["pools"]
    for name, host in (("prefill", nodes.prefill), ("decode", nodes.decode)):
        [worker] = pools[name]["workers"]
        assert worker["address"].startswith(f"{host.address}:")
        assert worker["pid"] in host.pids()
    ranks = [pid for pid in nodes.prefill.pids() if is_follower(pid)]
    assert len(ranks) == 1
    assert not [pid for pid in nodes.decode.pids() if is_follower(pid)]


def is_follower(pid: int) -> bool:
    return b"follower_process" in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_secrets_are_neither_on_command_lines_nor_in_logs(nodes: SeparateNodes) -> None:
    token = (nodes.logs / "token").read_text()
    pids = [pid for host in nodes.all for pid in host.pids()]
    texts = [Path(f"/proc/{pid}/cmdline").read_text(errors="replace") for pid in pids]
    for host in nodes.all:
        [folder] = re.findall(r"its files are in (\S+)", nodes.log_of(host, "node").read_text())
        texts += [
            file.read_text(errors="replace") for file in Path(folder).glob("session_*/logs/**/*") if file.is_file()
        ]
    assert len(texts) > 30
    assert not [text for text in texts if SECRET in text or token in text]


def test_every_port_is_documented(nodes: SeparateNodes) -> None:
    """Also those that only processes of the same host use."""
    for host in nodes.all:
        ports = {
            own.laddr.port
            for pid in host.pids()
            for own in psutil.Process(pid).net_connections("tcp")
            if own.status == psutil.CONN_LISTEN and own.laddr.ip not in ("127.0.0.1", "::1")
        }
        documented = {*range(RAY_PORT, RAY_PORT + 8), *range(10_002, 11_000), *range(20_000, 20_010)}
        assert ports <= documented | ({HTTP_PORT} if host is nodes.head else set()), host.namespace


@pytest.mark.skipif(bool(NO_FIREWALL), reason=NO_FIREWALL)
def test_the_firewall_closes_other_ports(nodes: SeparateNodes) -> None:
    """So the tests before have shown that the documented ports suffice."""
    probe = f"import socket; socket.create_connection(('{nodes.decode.address}', 23456), 1)"
    with pytest.raises(subprocess.CalledProcessError) as failure:
        nodes.prefill.run([sys.executable, "-c", probe], 30)
    assert "timed out" in failure.value.stderr


def test_a_node_that_was_cut_off_is_used_again(nodes: SeparateNodes, expected: Reference) -> None:
    before = nodes.ready_pid("decode")
    nodes.decode.cut_off()
    nodes.wait_for(lambda: before not in nodes.live_pids("decode"), "the replacement of the lost worker")
    nodes.decode.reconnect()
    nodes.wait_for(lambda: nodes.ready_pid("decode") not in (None, before), "the decode worker")
    assert [nodes.tokens(index) for index in range(2)] == expected.tokens[:2]


def test_a_node_that_is_told_to_end_finishes_its_requests(nodes: SeparateNodes) -> None:
    body = nodes.request(0) | {"max_tokens": 100, "ignore_eos": True, "n": 64}
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(nodes.call, "POST", "/v1/completions", body)
        nodes.wait_for(lambda: answer.done() or nodes.num_in_flight(), "the request")
        nodes.joined["decode"].send_signal(signal.SIGTERM)
        assert nodes.joined["decode"].wait(60) == 0
        assert [len(choice["token_ids"]) for choice in answer.result()["choices"]] == [100] * 64
    assert nodes.decode.pids() == []
