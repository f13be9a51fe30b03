"""Where workers listen."""

from __future__ import annotations

import pytest

from baton.core.errors import ConfigError
from cluster.config import network_config
from cluster.config.config import BatonConfig
from cluster.config.network_config import NetworkConfig


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        (None, "192.0.2.1"),
        ("10.0.0.0/8", "10.1.2.3"),
        ("10.1.2.3", "10.1.2.3"),
        ("10.1.2.9/24", "10.1.2.3"),
        ("fd00::/8", "[fd00::5]"),
    ],
)
def test_a_network_picks_the_nodes_own_address(
    address: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network_config, "own_addresses", lambda: ["127.0.0.1", "172.17.0.1", "10.1.2.3", "fd00::5"])
    assert NetworkConfig(address=address).address_here("192.0.2.1") == expected


def test_a_node_outside_the_network_says_what_addresses_it_has() -> None:
    with pytest.raises(ConfigError, match=r"203\.0\.113\.0/24, but the node .* has only the addresses .*127\.0\.0\.1"):
        NetworkConfig(address="203.0.113.0/24").address_here("127.0.0.1")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"ports": "20000"}, r"network\.ports: '20000' is not a range of ports; expected one such as 20000-20100"),
        ({"address": "eth0"}, r"network\.address: 'eth0' is neither an IP address nor a network"),
    ],
)
def test_wrong_values_name_the_key(values: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BatonConfig.from_dict({"network": values})
