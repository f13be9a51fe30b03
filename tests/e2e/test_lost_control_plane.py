"""Router, controller and Ray's control store (GCS) are killed: what the user reads, what continues, what is left.

A host of its own runs `baton node start` and `baton up`; docs/failures.md has the same cases.
"""

from __future__ import annotations

import json
import os
import shutil
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

from baton.core.roles import POOLS
from tests.namespaces import Host, hosts, why_no_namespaces
from tests.ranked_models import save_servable
from tests.running_cluster import live_workers

PROBLEM = why_no_namespaces()
REDIS = shutil.which("redis-server", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
pytestmark = pytest.mark.skipif(bool(PROBLEM), reason=PROBLEM)
ROOT = Path(__file__).parents[2]
BATON = [sys.executable, "-c", "from cluster.cli.command import main; main()"]
RAY_PORT, HTTP_PORT, REDIS_PORT = 6379, 8000, 6390
WAIT_S = 240.0
ASK = """
import json, sys, time, httpx
url, seconds, body = sys.argv[1], float(sys.argv[2]), json.loads(sys.argv[3])
end, first, ok, failed = time.monotonic() + seconds, [], 0, []
while True:
    try:
        with httpx.stream("POST", url, json=body, timeout=30) as answer:
            lines = list(answer.iter_lines())
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        tokens = [token for event in events for token in event["choices"][0]["token_ids"]]
        first = first or tokens
        if "data: [DONE]" in lines and tokens and tokens == first:
            ok += 1
        else:
            failed.append("\\n".join(lines))
    except (httpx.HTTPError, LookupError) as error:
        failed.append(repr(error))
    if time.monotonic() > end:
        break
print(json.dumps([ok, failed]))
"""
GET = "import sys, httpx; answer = httpx.get(sys.argv[1], timeout=30); print(answer.text)"


@dataclass
class OneHost:
    """A host with a Ray cluster and baton."""

    host: Host
    folder: Path
    variables: dict[str, str]
    ups: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def endpoint(self) -> str:
        return f"http://{self.host.address}:{HTTP_PORT}"

    def up(self, *arguments: str, **variables: str) -> subprocess.Popen[bytes]:
        """Runs `baton up` until it is ready."""
        command = [*BATON, "up", "-c", str(self.folder / "config.yaml"), *arguments]
        self.ups.append(self.host.start(command, self._log(len(self.ups)), self.variables | variables))
        self.wait_for(lambda: "ready: baton submit" in self.log, "baton up")
        return self.ups[-1]

    @property
    def log(self) -> str:
        """What the last `baton up` has printed."""
        return self._log(len(self.ups) - 1).read_text() if self.ups else ""

    def _log(self, number: int) -> Path:
        return self.folder / f"up-{number}.log"

    def wait_for(self, condition: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline, f"{what}: {self.log[-3000:]}"
            time.sleep(0.1)

    def get(self, path: str) -> Any:
        return json.loads(self.host.run([sys.executable, "-c", GET, self.endpoint + path], 60))

    def ask(self, for_s: float = 0.0, num_tokens: int = 20) -> tuple[int, list[str]]:
        """Streams answers one after another; returns how many are like the first one, and what the others were."""
        body = {"model": "tiny", "prompt": [5, 6, 7, 8], "max_tokens": num_tokens, "temperature": 0}
        body |= {"ignore_eos": True, "stream": True, "return_token_ids": True}
        command = [sys.executable, "-c", ASK, f"{self.endpoint}/v1/completions", str(for_s), json.dumps(body)]
        ok, failed = json.loads(self.host.run(command, for_s + 60))
        return ok, failed

    def pids(self, name: str) -> list[int]:
        """The processes of this host whose title begins with ``name``."""
        return [pid for pid in self.host.pids() if title(pid).startswith(name)]

    def kill(self, name: str) -> int:
        [pid] = self.pids(name)
        os.kill(pid, signal.SIGKILL)
        return pid

    def lose_controller(self, then: Callable[[], None] = lambda: None) -> None:
        """Kills the controller, calls ``then``, and waits for the next controller."""
        text = "the cluster has a controller again, after"
        num_before = self.log.count(text)
        self.kill("ray::Controller")
        then()
        self.wait_for(lambda: self.log.count(text) > num_before, "the next controller")

    def is_uniform(self) -> bool:
        """Whether each pool has its worker, with the pool's settings, and no other one."""
        status = self.get("/admin/status")
        states = [worker["state"] for worker in live_workers(status)]
        return states == ["ready"] * len(POOLS) and not any("outdated" in pool for pool in status["pools"].values())

    def serving(self) -> list[int]:
        """The processes that serve: router and workers."""
        return sorted(self.pids("ray::RouterActor") + self.pids("ray::WorkerActor"))


def title(pid: int) -> str:
    try:
        process = psutil.Process(pid)
        return process.name() if process.name() in ("gcs_server", "raylet") else " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OneHost]:
    folder = tmp_path_factory.mktemp("head")
    (folder / "cache").mkdir()
    variables = {
        "RAY_AUTH_TOKEN_PATH": str(folder / "token"),
        "BATON_CACHE": str(folder / "cache"),
        "PYTHONPATH": str(ROOT),
    }
    with hosts(("head",)) as found:
        host = found["head"]
        one = OneHost(host, folder, variables)
        if REDIS:
            host.start([REDIS, "--port", str(REDIS_PORT), "--save", "", "--dir", str(folder)], folder / "redis.log")
            variables["RAY_REDIS_ADDRESS"] = f"127.0.0.1:{REDIS_PORT}"
        command = [*BATON, "node", "start", "--pool", "any", "--cpus", "8", "--address", host.address]
        host.start(command, folder / "node.log", variables)
        one.wait_for(lambda: "the head is ready" in (folder / "node.log").read_text(), "baton node start")
        config = {
            "model": str(save_servable(folder / "tiny")),
            "served_model_name": "tiny",
            "ray": {"address": f"{host.address}:{RAY_PORT}", "start_timeout_s": WAIT_S},
            "router": {"host": host.address, "port": HTTP_PORT},
            "engine": {"decoder": "transformers"},
            "prefill": {"kv_blocks": 256},
            "decode": {"kv_blocks": 256},
        }
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        one.up()
        yield one


def test_a_lost_router_is_replaced_on_the_same_port(one: OneHost) -> None:
    workers, router = one.pids("ray::WorkerActor"), one.kill("ray::RouterActor")
    one.wait_for(lambda: f"the router serves again at {one.endpoint}, after" in one.log, "the replacement")
    assert "the router is lost, and its open streams break off; starting another one" in one.log
    assert one.pids("ray::WorkerActor") == workers
    assert router not in one.pids("ray::RouterActor")
    assert one.ask() == (1, [])


@pytest.mark.skipif(REDIS is None, reason="there is no redis-server")
def test_a_lost_gcs_comes_back_while_requests_are_served(one: OneHost) -> None:
    serving = one.serving()
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(one.ask, 12.0)
        [head] = [pid for pid in one.host.pids() if "cluster.nodes.node_process" in title(pid)]
        os.kill(head, signal.SIGSTOP)  # or it may start the next one before anything notices
        one.kill("gcs_server")
        one.wait_for(lambda: "does not answer. What runs goes on, but no process can start" in one.log, "the loss")
        os.kill(head, signal.SIGCONT)
        one.wait_for(lambda: "is back after" in one.log, "the return of the GCS")
        answered, failed = asked.result()
    assert answered
    assert failed == []
    assert one.serving() == serving
    lost = one.get("/admin/status")["pools"]["decode"]["workers"][0]["pid"]
    os.kill(lost, signal.SIGKILL)  # its replacement needs the GCS

    def is_replaced() -> bool:
        workers = one.get("/admin/status")["pools"]["decode"]["workers"]
        return [worker["pid"] != lost for worker in workers if worker["state"] == "ready"] == [True]

    one.wait_for(is_replaced, "the replacement of a worker")
    assert one.ask() == (1, [])


def test_a_lost_controller_is_replaced_and_takes_the_others_over(one: OneHost) -> None:
    serving = one.serving()
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(one.ask, 5.0)
        one.lose_controller()
        answered, failed = asked.result()
    assert answered
    assert failed == []
    assert f"taking over the router at {one.endpoint} and 2 workers" in one.log
    assert one.serving() == serving
    assert one.get("/admin/status")["pools"]["decode"]["target"] == 1


def test_lost_controllers_leave_no_open_files(one: OneHost) -> None:
    """Ray keeps the connection of a caller that has died until its calls end."""
    before = {pid: psutil.Process(pid).num_fds() for pid in one.serving()}
    num_lost = 3
    for _ in range(num_lost):
        one.lose_controller()
    more = [(title(pid), psutil.Process(pid).num_fds() - num_files) for pid, num_files in before.items()]
    assert all(count < num_lost for _, count in more), more


def test_an_upgrade_whose_controller_is_lost_is_undone_and_can_be_repeated(one: OneHost) -> None:
    config = yaml.safe_load((one.folder / "config.yaml").read_text())
    for pool in POOLS:
        config[pool]["max_num_seqs"] = 8
    (one.folder / "new.yaml").write_text(yaml.safe_dump(config))
    command = [*BATON, "upgrade", "-c", str(one.folder / "new.yaml")]
    first, second, before = one.folder / "upgrade-0.log", one.folder / "upgrade-1.log", one.serving()
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(one.ask, 20.0, 100)
        num_ready = one.log.count(" is ready at ")
        upgrading = one.host.start(command, first, one.variables)
        one.wait_for(lambda: set(one.pids("ray::WorkerActor")) - set(before), "the start of a new worker")
        held = (set(one.pids("ray::WorkerActor")) - set(before)).pop()
        os.kill(held, signal.SIGSTOP)  # the upgrade needs a new worker of each pool, and must not end before the loss
        one.wait_for(lambda: one.log.count(" is ready at ") > num_ready, "the other new worker")
        one.lose_controller(lambda: os.kill(held, signal.SIGCONT))
        assert upgrading.wait(WAIT_S) == 1
        one.wait_for(one.is_uniform, "the end of the new workers")
        answered, failed = asked.result()
    assert failed == []
    assert answered
    assert "The upgrade has failed: the controller was lost. Another one restores the old settings" in first.read_text()
    assert one.host.start(command, second, one.variables).wait(WAIT_S) == 0, second.read_text()
    assert "Upgraded: all workers run with the new configuration." in second.read_text()
    assert not set(before) & set(one.pids("ray::WorkerActor"))
    assert one.ask() == (1, [])
    (one.folder / "new.yaml").replace(one.folder / "config.yaml")


def test_a_controller_that_hangs_is_named_and_replaced_while_requests_are_served(one: OneHost) -> None:
    serving, text = one.serving(), "the cluster has a controller again, after"
    num_before, [hanging] = one.log.count(text), one.pids("ray::Controller")
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(one.ask, 20.0)
        os.kill(hanging, signal.SIGSTOP)
        one.wait_for(lambda: "the controller may hang: it has not answered for" in one.log, "a suspicion")
        error = one.get("/admin/status")["error"]
        one.wait_for(lambda: one.log.count(text) > num_before, "the next controller")
        answered, failed = asked.result()
    assert error["code"] == "controller_lost"
    assert "has not answered for 5 s" in error["message"]
    assert failed == []
    assert answered
    assert not psutil.pid_exists(hanging)
    assert one.serving() == serving
    assert one.get("/admin/status")["pools"]["decode"]["target"] == 1


def test_a_controller_that_waits_for_a_hanging_gcs_is_not_blamed(one: OneHost) -> None:
    """Starting a worker is a call of the GCS, in which the controller waits."""
    before, [gcs] = len(one.log), one.pids("gcs_server")
    [controller] = one.pids("ray::Controller")
    scaling = one.folder / "scaling.log"
    os.kill(gcs, signal.SIGSTOP)
    try:
        command = [*BATON, "scale", "decode=2", "--endpoint", one.endpoint, "--no-wait"]
        one.host.start(command, scaling, one.variables).wait(WAIT_S)
        one.wait_for(lambda: "(GCS) at" in one.log[before:], "a warning")
        time.sleep(14.0)  # a controller that hangs would be replaced after 13
        assert one.ask() == (1, [])
    finally:
        os.kill(gcs, signal.SIGCONT)
    one.wait_for(lambda: " is ready at" in one.log[before:], "the new worker")
    assert one.pids("ray::Controller") == [controller]
    assert "hangs" not in one.log[before:]
    command = [*BATON, "scale", "decode=1", "--endpoint", one.endpoint]
    assert one.host.start(command, scaling, one.variables).wait(WAIT_S) == 0


@pytest.mark.parametrize("is_reported", [True, False])
def test_a_controller_lost_while_the_raylet_hangs_is_replaced_afterwards(one: OneHost, is_reported: bool) -> None:
    """``is_reported``: the raylet may tell the GCS of the loss before it hangs."""
    serving, before, [raylet] = one.serving(), len(one.log), one.pids("raylet")

    def hold() -> None:
        os.kill(raylet, signal.SIGSTOP)
        one.wait_for(lambda: "Ray's raylet at" in one.log[before:], "a warning")
        assert one.ask() == (1, [])
        os.kill(raylet, signal.SIGCONT)

    if not is_reported:
        os.kill(raylet, signal.SIGSTOP)
    one.lose_controller(hold)
    assert "is back after" in one.log[before:]
    assert one.serving() == serving
    assert one.ask() == (1, [])


def test_baton_up_takes_over_what_a_killed_one_has_left(one: OneHost) -> None:
    serving, killed = one.serving(), one.ups[-1]
    killed.kill()
    one.wait_for(lambda: not one.pids("ray::Controller"), "the end of the controller")
    assert one.ask(2.0)[1] == []
    assert one.get("/admin/status")["error"]["code"] == "controller_lost"
    refused = subprocess.run(
        one.host.command([*BATON, "up", "-c", str(one.folder / "config.yaml"), "--set", "dtype=float32"]),
        env={**os.environ, **one.variables},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert "with another configuration: dtype. Start with that one to take them over" in refused.stderr
    one.up()
    assert f"taking over the router at {one.endpoint} and 2 workers" in one.log
    assert one.serving() == serving
    assert [worker["state"] for worker in one.get("/admin/status")["pools"]["prefill"]["workers"]] == ["ready"]
    assert one.ask() == (1, [])


def test_baton_down_ends_what_a_killed_one_has_left(one: OneHost) -> None:
    one.ups[-1].kill()
    one.ups[-1].wait()
    command = ["env", *(f"{name}={value}" for name, value in one.variables.items()), *BATON, "down"]
    said = one.host.run(command, WAIT_S)
    assert "Ended 3 processes of the cluster at" in said
    one.wait_for(lambda: one.serving() == [], "the end of router and workers")


def test_router_and_workers_end_without_a_controller(one: OneHost) -> None:
    up = one.up("--set", "ray.orphan_timeout_s=1")
    assert len(one.serving()) == 3
    up.kill()
    one.wait_for(lambda: one.serving() == [], "the end of router and workers")


@pytest.mark.thorough(
    covered_by="tests/unit/cluster/losses/test_ray_part_watch.py::test_a_loss_that_lasts_ends_the_cluster_before_ray_does"
)
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_local_cluster_without_gcs_ends_with_the_reason(one: OneHost, fault: signal.Signals) -> None:
    """Ray, which would end it later, leaves no time for that."""
    before = set(one.host.pids())
    settings = ("ray.address=null", "simulation.profile=h100-8b")
    up = one.up(*(part for text in settings for part in ("--set", text)), RAY_gcs_rpc_server_reconnect_timeout_s="32")
    [gcs] = set(one.pids("gcs_server")) - before
    os.kill(gcs, fault)
    assert up.wait(WAIT_S) == 1
    assert "does not answer. What runs goes on, but no process can start. The cluster ends in 24 s" in one.log
    assert "error: Ray's control store (GCS) at" in one.log
    one.wait_for(lambda: set(one.host.pids()) <= before, "the end of all processes")
