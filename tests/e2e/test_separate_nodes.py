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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from baton.core.roles import POOLS
from tests.engine_runs import build_engine, run, tokens_of
from tests.namespaces import Host, hosts, why_no_firewall, why_no_namespaces
from tests.ranked_models import PROMPTS as LONG_AND_SHORT
from tests.ranked_models import Build, build_with_draft, sampled, save_servable
from tests.separate_nodes import BATON, HTTP_PORT, RAY_PORT, START_S, WORKER_PORTS, SeparateNodes

PROBLEM = why_no_namespaces()
NO_FIREWALL = PROBLEM or why_no_firewall()
pytestmark = pytest.mark.skipif(bool(PROBLEM), reason=PROBLEM)
PROMPTS = LONG_AND_SHORT[::3]
PARAMS = sampled(len(PROMPTS), 20)
RAY_PORTS = {
    "head": [str(RAY_PORT), str(RAY_PORT + 1), str(RAY_PORT + 2), "10002:10999"],
    "worker": [str(RAY_PORT + 1), str(RAY_PORT + 2), "10002:10999"],
}
"""Those that docs/machines.md says to open."""
SECRET = f"hf_{secrets.token_hex(16)}"


@dataclass
class Nodes(SeparateNodes):
    """A cluster with one worker in each pool, on nodes of their own."""

    @property
    def prefill(self) -> Host:
        return self.members["prefill"]

    @property
    def decode(self) -> Host:
        return self.members["decode"]

    def tokens(self, index: int) -> list[int]:
        """The tokens of the answer to a prompt."""
        return list(self.cluster.post("/v1/completions", self.request(index))["choices"][0]["token_ids"])

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

    def num_in_flight(self, pool: str) -> int:
        """The sequences on the pool's workers."""
        return sum(int(worker["in_flight"]) for worker in self.cluster.workers(pool))

    def live_pids(self, pool: str) -> list[int | None]:
        """The processes of the pool's workers that are not dead; ``None`` for one that has not started."""
        return [worker.get("pid") for worker in self.cluster.workers(pool)]

    def ready_pid(self, pool: str) -> int | None:
        """The process of the pool's only worker, if it is ready."""
        ready = [worker["pid"] for worker in self.cluster.workers(pool) if worker["state"] == "ready"]
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
def nodes(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    with hosts(("head", *POOLS)) as found:
        head = found.pop("head")
        nodes = Nodes(head, found, tmp_path_factory.mktemp("logs"))
        if not NO_FIREWALL:
            head.accept_only([*RAY_PORTS["head"], str(HTTP_PORT)])
            for host in found.values():
                host.accept_only([*RAY_PORTS["worker"], WORKER_PORTS.replace("-", ":")])
        nodes.start_head()
        for pool in POOLS:
            nodes.join(pool, pool)
        nodes.up(settings(folder), {"HF_TOKEN": SECRET})
        yield nodes


def settings(folder: Path) -> dict[str, Any]:
    pool = {"kv_blocks": 512, "chunk_tokens": 32}
    return {
        "model": str(folder),
        "served_model_name": "tiny",
        "dtype": "float32",
        "engine": {"block_size": 4},
        "prefill": {**pool, "tensor_parallel": 2},
        "decode": {**pool, "tensor_parallel": 1},
        "routing": {"local_prefill": "never"},
    }


def test_the_nodes_have_no_problem(nodes: Nodes) -> None:
    variables = [f"{name}={value}" for name, value in nodes.variables.items()]
    check = ["env", *variables, *BATON, "check", "--nodes", "--json", "-c", str(nodes.configuration_file)]
    report = json.loads(nodes.head.run(check, START_S))
    assert [problem for problem in report["problems"] if problem["is_fatal"]] == []
    assert {(link["from"], link["to"]) for link in report["links"]} == {(nodes.prefill.address, nodes.decode.address)}
    assert report["links"][0]["bytes_per_s"] > 0
    pools = {node["name"]: node["pools"] for node in report["nodes"]}
    assert pools == {nodes.prefill.address: ["prefill"], nodes.decode.address: ["decode"]}


def test_kv_of_a_divided_worker_crosses_the_link(nodes: Nodes, expected: Reference) -> None:
    before = nodes.prefill.sent_bytes()
    assert [nodes.tokens(index) for index in range(len(PROMPTS))] == expected.tokens
    assert nodes.prefill.sent_bytes() - before >= expected.kv_bytes


def test_workers_are_on_the_nodes_of_their_pool(nodes: Nodes) -> None:
    pools = nodes.cluster.get("/admin/status")["pools"]
    for name, host in (("prefill", nodes.prefill), ("decode", nodes.decode)):
        [worker] = pools[name]["workers"]
        assert worker["address"].startswith(f"{host.address}:")
        assert worker["pid"] in host.pids()
    ranks = [pid for pid in nodes.prefill.pids() if is_follower(pid)]
    assert len(ranks) == 1
    assert not [pid for pid in nodes.decode.pids() if is_follower(pid)]


def is_follower(pid: int) -> bool:
    return b"follower_process" in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_secrets_are_neither_on_command_lines_nor_in_logs(nodes: Nodes) -> None:
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


def test_every_port_is_documented(nodes: Nodes) -> None:
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
def test_the_firewall_closes_other_ports(nodes: Nodes) -> None:
    """So the tests before have shown that the documented ports suffice."""
    probe = f"import socket; socket.create_connection(('{nodes.decode.address}', 23456), 1)"
    with pytest.raises(subprocess.CalledProcessError) as failure:
        nodes.prefill.run([sys.executable, "-c", probe], 30)
    assert "timed out" in failure.value.stderr


def test_a_node_that_was_cut_off_is_used_again(nodes: Nodes, expected: Reference) -> None:
    before = nodes.ready_pid("decode")
    nodes.decode.cut_off()
    nodes.wait_for(lambda: before not in nodes.live_pids("decode"), "the replacement of the lost worker")
    nodes.decode.reconnect()
    nodes.wait_for(lambda: nodes.ready_pid("decode") not in (None, before), "the decode worker")
    assert [nodes.tokens(index) for index in range(2)] == expected.tokens[:2]


LONG = {"max_tokens": 100, "ignore_eos": True, "n": 64}


def lengths(answer: dict[str, Any]) -> list[int]:
    return [len(choice["token_ids"]) for choice in answer["choices"]]


def drain(nodes: Nodes, host: Host, *options: str) -> subprocess.CompletedProcess[str]:
    """Runs what a pod runs before its end."""
    variables = [f"{name}={value}" for name, value in nodes.variables.items()]
    command = ["env", *variables, *BATON, "node", "drain", f"{nodes.head.address}:{RAY_PORT}", *options]
    return subprocess.run(host.command(command), capture_output=True, text=True, timeout=START_S)


def test_a_node_that_is_drained_finishes_its_requests(nodes: Nodes) -> None:
    before, body = nodes.ready_pid("decode"), nodes.request(0) | LONG
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(nodes.cluster.post, "/v1/completions", body)
        # A sequence that still waits for a worker would find none.
        nodes.wait_for(lambda: answer.done() or nodes.num_in_flight("decode") == LONG["n"], "the request")
        drained = drain(nodes, nodes.decode, "--timeout", "120")
        assert (drained.returncode, drained.stdout) == (0, ""), drained.stderr
        assert lengths(answer.result()) == [100] * 64
    # The node has left, so what started it has nothing left to drain, as in a pod after its hook.
    nodes.joined["decode"].send_signal(signal.SIGTERM)
    assert nodes.joined["decode"].wait(60) == 0
    nodes.decode.forget_ended()
    nodes.join("decode", "decode")
    nodes.wait_for(lambda: nodes.ready_pid("decode") not in (None, before), "the decode worker")


def test_a_node_stays_when_the_whole_cluster_ends(nodes: Nodes, expected: Reference) -> None:
    before = nodes.ready_pid("decode")
    assert drain(nodes, nodes.head, "--whole-cluster").returncode == 0
    drained = drain(nodes, nodes.decode, "--timeout", "8")
    assert drained.returncode != 0
    assert "the whole cluster ends" in drained.stderr
    assert nodes.ready_pid("decode") == before
    assert nodes.tokens(0) == expected.tokens[0]


def test_a_node_that_is_told_to_end_finishes_its_requests(nodes: Nodes) -> None:
    body = nodes.request(0) | LONG
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(nodes.cluster.post, "/v1/completions", body)
        # A sequence that still waits for a worker would find none.
        nodes.wait_for(lambda: answer.done() or nodes.num_in_flight("decode") == LONG["n"], "the request")
        nodes.joined["decode"].send_signal(signal.SIGTERM)
        assert nodes.joined["decode"].wait(60) == 0
        assert lengths(answer.result()) == [100] * 64
    assert nodes.decode.pids() == []
