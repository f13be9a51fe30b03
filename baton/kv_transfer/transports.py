"""Names of the transports. Registration is this table, nothing else."""

from __future__ import annotations

from collections.abc import Callable

from baton.core.errors import ConfigError
from baton.kv_transfer.base import KVTransport
from baton.kv_transfer.payload.local_memory import LocalMemory
from baton.kv_transfer.payload.nixl_agent import NixlExport
from baton.kv_transfer.sender import GrpcKVTransport
from baton.kv_transfer.throttle import Throttle

_TRANSPORTS: dict[str, Callable[[int], LocalMemory]] = {
    "grpc": LocalMemory,
    "nixl": lambda part_bytes: LocalMemory(part_bytes, export=NixlExport()),
}
"""All have their control in gRPC. They differ in who can read parts from the sender's memory."""


def create_transport(
    name: str,
    max_bytes_per_second: float | None,
    timeout_s: float,
    readable_part_bytes: int | None = None,
    *,
    connections: int = 0,
) -> KVTransport:
    """
    Args:
        timeout_s: how long a receiver may keep a transfer waiting.
        readable_part_bytes: largest part that receivers may read from this process's memory; None: they read none.
        connections: how many of a transfer's own its parts may travel through where receivers wait for them.

    Raises:
        ConfigError: the name is unknown, or what it needs is not there.
    """
    if name not in _TRANSPORTS:
        raise ConfigError(
            f"kv_transfer.transport is {name!r}, but the known transports are: {', '.join(sorted(_TRANSPORTS))}."
        )
    throttle = Throttle(max_bytes_per_second) if max_bytes_per_second else None
    memory = _TRANSPORTS[name](readable_part_bytes) if readable_part_bytes else None
    return GrpcKVTransport(throttle, timeout_s, memory, connections=connections)
