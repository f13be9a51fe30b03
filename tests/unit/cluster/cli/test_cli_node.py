"""What `baton node` reads and prints."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.nodes import node_leaving, ray_head
from tests.unit.cluster.command_line import baton, environment

__all__ = ["baton", "environment"]  # fixtures


def test_the_token_is_made_once_and_printed(baton, tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    file = tmp_path / "token"
    status, out, _ = baton("node", "token", "--token-file", str(file))
    assert (status, out.strip()) == (0, file.read_text())
    assert baton("node", "token", "--token-file", str(file))[1] == out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["join", "somewhere"], "expected HOST:PORT"),
        (["join", "somewhere:99999"], "with a port from 1 to 65535"),
        (["drain", "somewhere"], "expected HOST:PORT"),
        (["join", "h:1", "--label", "rack"], "expected KEY=VALUE"),
        (["join", "h:1", "--worker-ports", "7"], "expected one such as 20000-20100"),
        (["join", "h:1", "--pool", "both"], "'both' is not one of"),
    ],
)
def test_wrong_options_are_explained(baton, arguments, message):
    status, _, err = baton("node", *arguments)
    assert status == 2
    assert message in " ".join(err.replace("│", " ").split())


class RecordingHead:
    """Remembers what it is asked."""

    calls: list[tuple[Any, ...]]

    def __init__(self, address: str, token: str | None) -> None:
        self.calls.append((address, token))

    def announce_end(self) -> None:
        self.calls.append(("end",))


@pytest.fixture
def calls(monkeypatch) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    monkeypatch.setattr(RecordingHead, "calls", found, raising=False)
    monkeypatch.setattr(ray_head, "RayHead", RecordingHead)
    monkeypatch.setattr(node_leaving, "leave_cluster", lambda head, *arguments: found.append(arguments[:2]))
    return found


def test_a_node_is_drained_with_the_clusters_token(baton, calls):
    assert baton("node", "drain", "10.0.0.1:6379", "--address", "10.0.0.2", "--timeout", "60")[0] == 0
    assert calls == [("10.0.0.1:6379", "secret"), (["10.0.0.2"], 60.0)]


def test_the_address_of_a_drained_node_is_this_machines(baton, calls):
    assert baton("node", "drain", "10.0.0.1:6379")[0] == 0
    assert "127.0.0.1" in calls[1][0]


def test_the_end_of_the_whole_cluster_is_announced_only(baton, calls):
    assert baton("node", "drain", "10.0.0.1:6379", "--whole-cluster")[0] == 0
    assert calls[1:] == [("end",)]


def test_a_node_without_a_token_is_not_drained(baton, calls, monkeypatch, tmp_path):
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    status, _, err = baton("node", "drain", "10.0.0.1:6379", "--token-file", str(tmp_path / "none"))
    assert status != 0
    assert "no token" in " ".join(err.split())
    assert calls == []
