"""Names of the transports. Registration is this table, nothing else."""

from __future__ import annotations

from collections.abc import Callable

from cluster.kv_transfer.base import KVTransport
from cluster.kv_transfer.grpc_transport import GrpcKVTransport
from cluster.kv_transfer.throttle import Throttle
from engine.errors import ConfigError

_TRANSPORTS: dict[str, Callable[[Throttle | None, float], KVTransport]] = {"grpc": GrpcKVTransport}


def create_transport(name: str, max_bytes_per_second: float | None, timeout_s: float) -> KVTransport:
    """Raises :class:`ConfigError` for an unknown name."""
    if name not in _TRANSPORTS:
        raise ConfigError(
            f"kv_transfer.transport is {name!r}, but the known transports are: {', '.join(sorted(_TRANSPORTS))}."
        )
    throttle = Throttle(max_bytes_per_second) if max_bytes_per_second else None
    return _TRANSPORTS[name](throttle, timeout_s)
