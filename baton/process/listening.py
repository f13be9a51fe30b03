"""The socket of the HTTP endpoint."""

from __future__ import annotations

import socket

from baton.core.errors import ConfigError


def listen(host: str, port: int, *, is_shared: bool = False) -> socket.socket:
    """Binds the socket of an endpoint.

    Args:
        is_shared: other sockets of this user may be bound to the same address in the same way, and the kernel divides
            connections among those that listen.

    Raises:
        ConfigError: the address is not available.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if is_shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"Cannot listen on router.host {host} port {port}: {error.strerror or error}. "
            "Stop the program that uses the port, or set router.port (0 chooses a free port)."
        ) from error
    listener.setblocking(False)
    return listener
