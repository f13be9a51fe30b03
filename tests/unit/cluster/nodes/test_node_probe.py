"""The connections that a probe tries."""

from __future__ import annotations

import pytest

from baton.core.errors import ConfigError
from cluster.config.config import BatonConfig
from cluster.nodes import node_probe
from cluster.nodes.node_probe import NodeProbe


def make_probe(**network: str) -> NodeProbe:
    return NodeProbe(BatonConfig.from_dict({"network": network}).to_dict(), {})


def test_a_listener_is_reached_where_workers_listen_and_a_closed_port_is_explained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node_probe, "_MOST_BYTES", 2**22)
    target = make_probe(ports="21500-21600").listen()
    assert target[0] == "127.0.0.1"
    assert 21_500 <= target[1] <= 21_600
    sender = make_probe()
    assert sender.reach([target, ("127.0.0.1", 1)]) == ["", "Connection refused"]
    assert sender.send(target) > 0
    assert sender.send(("127.0.0.1", 1)) == 0


def test_a_node_outside_the_network_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"network\.address is 203\.0\.113\.0/24"):
        make_probe(address="203.0.113.0/24").listen()
