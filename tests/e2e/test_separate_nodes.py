"""A Ray cluster of three hosts with addresses of their own: head, prefill node and decode node."""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.process.worker_environment import LOCAL_RAY_VARIABLES
from tests.engine_runs import build_engine, run, tokens_of
from tests.namespaces import Host, hosts, why_no_namespaces
from tests.ranked_models import PROMPTS as LONG_AND_SHORT
from tests.ranked_models import Build, build_with_draft, sampled, save_servable

PROBLEM = why_no_namespaces()
pytestmark = pytest.mark.skipif(bool(PROBLEM), reason=PROBLEM)
PROMPTS = LONG_AND_SHORT[::3]
PARAMS = sampled(len(PROMPTS), 20)
RAY_PORT, HTTP_PORT = 6379, 8000
START_S = 240.0
OBJECT_STORE_BYTES = 80 * 2**20
NO_DASHBOARD = "--include-dashboard=false"
VARIABLES = {**LOCAL_RAY_VARIABLES, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
"""Ray's head asks for a token, which every node and driver must have."""
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

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Calls the endpoint from the head's host."""
        url = f"http://{self.head.address}:{HTTP_PORT}{path}"
        content = json.dumps(body) if body else ""
        return json.loads(self.head.run([sys.executable, "-c", CALL, method, url, content], 90))

    def wait_for(self, condition: Callable[[], Any], what: str, logs: Path) -> None:
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
        texts = [f"{log.name}:\n{log.read_text()[-2000:]}" for log in sorted(logs.glob("*.log"))]
        raise TimeoutError(f"{what} did not start\n" + "\n".join(texts))

    @property
    def all(self) -> tuple[Host, ...]:
        return self.head, self.prefill, self.decode

    def complete(self, index: int) -> Any:
        own = PARAMS[index]
        body = {
            "model": "tiny",
            "prompt": PROMPTS[index],
            "max_tokens": own.max_tokens,
            "temperature": own.temperature,
            "seed": own.seed,
            "return_token_ids": True,
        }
        return self.call("POST", "/v1/completions", body)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_servable(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def nodes(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeparateNodes]:
    logs = tmp_path_factory.mktemp("logs")
    ray_folder = tempfile.mkdtemp(prefix="ray")  # short, since Ray's sockets lie deep in it
    try:
        with hosts(("head", "prefill", "decode")) as found:
            cluster = SeparateNodes(**found)
            address = f"{cluster.head.address}:{RAY_PORT}"
            log = start_ray(
                cluster.head, logs, ["--head", f"--port={RAY_PORT}", f"--temp-dir={ray_folder}", NO_DASHBOARD]
            )
            cluster.wait_for(partial(has_started, log), "Ray's head", logs)
            for name in ("prefill", "decode"):
                log = start_ray(found[name], logs, [f"--address={address}", f"--labels=pool={name}"])
                cluster.wait_for(partial(has_started, log), f"Ray on {name}", logs)  # nodes share a folder of sockets
            config = logs / "config.yaml"
            config.write_text(yaml.safe_dump(configuration(folder, cluster.head.address)))
            command = [sys.executable, "-c", "from cluster.cli.command import main; main()", "up", "-c", str(config)]
            cluster.head.start(command, logs / "baton.log", VARIABLES)
            cluster.wait_for(lambda: cluster.call("GET", "/ready"), "the cluster", logs)
            yield cluster
    finally:
        shutil.rmtree(ray_folder, ignore_errors=True)


def has_started(log: Path) -> bool:
    return "Ray runtime started" in log.read_text()


def start_ray(host: Host, logs: Path, arguments: list[str]) -> Path:
    """Starts a node of Ray. Returns its log."""
    ray = str(Path(sys.executable).with_name("ray"))
    common = ["--block", f"--node-ip-address={host.address}", "--num-cpus=8", "--disable-usage-stats"]
    common += [f"--object-store-memory={OBJECT_STORE_BYTES}"]
    log = logs / f"{host.namespace}.log"
    host.start([ray, "start", *arguments, *common], log, VARIABLES)
    return log


def configuration(folder: Path, address: str) -> dict[str, Any]:
    pool = {"kv_blocks": 512, "chunk_tokens": 32}
    return {
        "model": str(folder),
        "served_model_name": "tiny",
        "dtype": "float32",
        "engine": {"block_size": 4},
        "ray": {"address": f"{address}:{RAY_PORT}", "start_timeout_s": START_S},
        "router": {"host": address, "port": HTTP_PORT},
        "prefill": {**pool, "tensor_parallel": 2, "resources": {"labels": {"pool": "prefill"}}},
        "decode": {**pool, "tensor_parallel": 1, "resources": {"labels": {"pool": "decode"}}},
        "kv_transfer": {"shared_memory": "off"},  # the hosts are one machine after all
        "routing": {"local_prefill": "never"},
    }


def test_kv_of_a_divided_worker_crosses_the_link(nodes: SeparateNodes, folder: Path) -> None:
    runner = build_with_draft(Build(str(folder)), None)[0]
    expected = tokens_of(run(build_engine(runner), PROMPTS, PARAMS))
    before = nodes.prefill.sent_bytes()
    answers = [nodes.complete(index) for index in range(len(PROMPTS))]
    assert [answer["choices"][0]["token_ids"] for answer in answers] == expected
    kv_bytes = sum(map(len, PROMPTS)) * runner.spec.bytes_per_token
    assert nodes.prefill.sent_bytes() - before >= kv_bytes


def test_workers_are_where_their_labels_say(nodes: SeparateNodes) -> None:
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
