"""How `baton node` runs Ray's process, with a script in Ray's place."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.core.errors import ConfigError, WorkerLostError
from baton.process.stop_signals import StopEvent
from cluster.nodes import ray_node
from cluster.nodes.node_labels import NodePool
from cluster.nodes.ray_node import NodeOptions, NodeStartError, RayProcess, run_head, run_member
from cluster.nodes.ray_ports import RayPorts
from tests.waiting import until

HEAD = "127.0.0.1:6379"
RUNS = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); print('up', flush=True); "
RUNS_UNTIL_ENDED = RUNS + "time.sleep(600)"
RUNS_BRIEFLY = RUNS + "print('error: marked dead'); sys.exit(1)"


class FakeHead:
    """A head that answers."""

    def __init__(self, address: str, token: str | None) -> None:
        self.address = address

    def check(self) -> None: ...

    def is_reachable(self) -> bool:
        return True

    def has_node(self, address: str, port: int) -> bool:
        return True

    def versions(self) -> dict[str, str]:
        return {}

    def publish_baton(self) -> None: ...


class Folder:
    """A folder of Ray's files."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def publish_head(self, address: str) -> None: ...

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *exception: object) -> None: ...


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The scripts that take Ray's place, one after another; the last one stays."""
    found = [RUNS_UNTIL_ENDED]
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.setattr(ray_node, "RayHead", FakeHead)
    monkeypatch.setattr(ray_node, "_address_towards", lambda _: "10.0.0.9")
    monkeypatch.setattr(ray_node, "RayFolder", lambda: Folder(tmp_path))
    monkeypatch.setattr(ray_node, "_PAUSE_S", 0.01)
    monkeypatch.setattr(ray_node, "_POLL_S", 0.01)

    def command(*arguments: Any) -> list[str]:
        return [sys.executable, "-c", found.pop(0) if len(found) > 1 else found[0]]

    monkeypatch.setattr(ray_node, "_command", command)
    return found


@pytest.fixture
def stop() -> Iterator[StopEvent]:
    event = StopEvent()
    yield event
    event.set()


async def test_a_member_that_was_declared_dead_joins_again(scripts: list[str], stop: StopEvent) -> None:
    scripts.insert(0, RUNS_BRIEFLY)
    lines: list[str] = []
    thread = threading.Thread(target=run_member, args=(HEAD, NodeOptions(), lines.append, stop))
    thread.start()
    await until(lambda: sum("has joined" in line for line in lines) == 2)
    assert any("joins it again: error: marked dead" in line for line in lines)
    stop.set()
    thread.join(30)
    assert not thread.is_alive()
    assert lines[-1].startswith("draining this node")


def test_a_member_that_never_joined_fails(scripts: list[str], stop: StopEvent, monkeypatch: pytest.MonkeyPatch) -> None:
    scripts[:] = ["import sys; print('error: port 6380 is taken'); sys.exit(1)"]
    monkeypatch.setattr(FakeHead, "has_node", lambda *arguments: False)
    with pytest.raises(NodeStartError, match="error: port 6380 is taken"):
        run_member(HEAD, NodeOptions(), lambda line: None, stop)


def test_a_head_that_ends_is_an_error(scripts: list[str], stop: StopEvent) -> None:
    scripts[:] = [RUNS_BRIEFLY]
    with pytest.raises(WorkerLostError, match="head has ended: error: marked dead"):
        run_head(NodeOptions(NodePool.NONE), lambda line: None, stop)


def test_the_process_that_ended_a_head_is_named(scripts: list[str], stop: StopEvent) -> None:
    lines = (
        "ERR scripts.py:1307 -- Some Ray subprocesses exited unexpectedly:",
        "ERR scripts.py:87 -- raylet [exit code=1]",
        "ERR scripts.py:122 -- store.cc:366: Disconnecting client due to connection error",
    )
    scripts[:] = [f"import time; time.sleep(0.3); print({chr(10).join(lines)!r}); exit(1)"]
    with pytest.raises(WorkerLostError, match=r"head has ended: raylet \[exit code=1\]$"):
        run_head(NodeOptions(NodePool.NONE), lambda line: None, stop)


def test_no_node_starts_without_authentication(
    scripts: list[str], stop: StopEvent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    for run in (lambda: run_head(NodeOptions(), print, stop), lambda: run_member(HEAD, NodeOptions(), print, stop)):
        with pytest.raises(ConfigError, match="RAY_AUTH_MODE"):
            run()


def test_a_process_that_does_not_drain_in_time_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_node, "_END_S", 0.2)
    deaf = RUNS + "signal.signal(2, signal.SIG_IGN); signal.signal(15, signal.SIG_IGN); "
    deaf += "print('deaf', flush=True); time.sleep(600)"
    with RayProcess([sys.executable, "-c", deaf], Folder(tmp_path), 0.1) as process:  # type: ignore[arg-type]
        while process.last_line() != "deaf":
            pass
        process.end(drains=True)
        assert process.has_ended()


def test_the_token_is_not_on_the_command_line_and_ports_are_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    options = NodeOptions(NodePool.DECODE, num_gpus=2, labels={"rack": "7"}, ports=RayPorts(7000))
    command = ray_node._command(options, Folder(Path("/tmp/here")), "10.0.0.2", "10.0.0.1:6379")  # type: ignore[arg-type]
    assert not any("secret" in argument for argument in command)
    assert {"--address=10.0.0.1:6379", "--temp-dir=/tmp/here", "--labels=baton-pool=decode,rack=7"} <= {*command}
    assert {"--node-manager-port=7001", "--min-worker-port=10002", "--num-gpus=2"} <= {*command}
    assert "--port=7000" not in command
    head = ray_node._command(NodeOptions(NodePool.NONE), Folder(Path("/tmp/here")), "10.0.0.1", None)  # type: ignore[arg-type]
    assert {"--head", "--port=6379", "--num-cpus=0", "--num-gpus=0", "--include-dashboard=false"} <= {*head}


def test_a_node_has_no_loopback_address(stop: StopEvent, scripts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"loopback address 127\.0\.0\.1.* leave --address out"):
        run_head(NodeOptions(address="127.0.0.1"), print, stop)
    monkeypatch.setattr(ray_node, "_address_towards", lambda _: "127.0.0.1")
    with pytest.raises(ConfigError, match=r"loopback address 127\.0\.0\.1"):
        run_member(HEAD, NodeOptions(), print, stop)


def test_a_head_does_not_take_another_one_for_itself(
    stop: StopEvent, scripts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_node, "_address_here", lambda *_: "127.0.0.1")
    with socket.create_server(("0.0.0.0", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(NodeStartError, match=rf"cannot listen at 127\.0\.0\.1:{port}: .*in use.*--port"):
            run_head(NodeOptions(ports=RayPorts(first=port)), print, stop)
