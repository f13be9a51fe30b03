"""An actor that runs on a node for a moment, to see what the node is like and which others it reaches."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import ray

from baton.process.ports import listen_at
from baton.process.worker_environment import adopt_variables
from cluster.config.config import BatonConfig
from cluster.nodes.node_facts import gather_facts

_CONNECT_TIMEOUT_S = 5.0
_SEND_S = 1.0
_MOST_BYTES = 512 * 2**20
_BLOCK_BYTES = 2**20

Target = tuple[str, int]
"""Address and port of another node's listener."""


class NodeProbe:
    """Runs where workers would run, and listens where they would listen.

    Args:
        variables: see :func:`baton.process.worker_environment.carried_variables`.
    """

    def __init__(self, config: dict[str, Any], variables: Mapping[str, str]) -> None:
        adopt_variables(variables)
        self._config = BatonConfig.from_dict(config)
        self._listener: socket.socket | None = None

    def facts(self) -> dict[str, Any]:
        """See :class:`cluster.nodes.node_facts.NodeFacts`."""
        return gather_facts(self._config.model).to_dict()

    def now_s(self) -> float:
        """This node's clock, in seconds since 1970."""
        return time.time()

    def listen(self) -> Target:
        """Opens a listener as a worker does; it discards what arrives.

        Raises:
            ConfigError: ``network`` does not fit this node.
        """
        network = self._config.network
        default = "127.0.0.1" if self._config.ray.is_local else str(ray.util.get_node_ip_address())
        host = network.address_here(default)
        self._listener = network.port_range.bind(host, lambda port: listen_at(host, port))
        threading.Thread(target=_discard_all, args=(self._listener,), daemon=True).start()
        return host, int(self._listener.getsockname()[1])

    def reach(self, targets: list[Target]) -> list[str]:
        """Connects to each target. Returns why that fails, or an empty text."""
        return [_why_unreachable(target) for target in targets]

    def send(self, target: Target) -> float:
        """Sends for about a second over one connection. Returns bytes per second, 0 if it cannot connect."""
        block = bytes(_BLOCK_BYTES)
        num_bytes = 0
        try:
            with _connect(target) as connection:
                connection.settimeout(_SEND_S + _CONNECT_TIMEOUT_S)
                begun_s = time.monotonic()
                while time.monotonic() < begun_s + _SEND_S and num_bytes < _MOST_BYTES:
                    connection.sendall(block)
                    num_bytes += len(block)
                connection.shutdown(socket.SHUT_WR)
                connection.recv(1)  # the receiver closes once it has everything
                return num_bytes / (time.monotonic() - begun_s)
        except OSError:
            return 0.0


def _connect(target: Target) -> socket.socket:
    host, port = target
    return socket.create_connection((host.strip("[]"), port), timeout=_CONNECT_TIMEOUT_S)


def _why_unreachable(target: Target) -> str:
    try:
        _connect(target).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _discard_all(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_discard, args=(connection,), daemon=True).start()


def _discard(connection: socket.socket) -> None:
    buffer = bytearray(_BLOCK_BYTES)
    with connection, suppress(OSError):
        while connection.recv_into(buffer):
            pass
