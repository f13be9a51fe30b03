"""The ports that this machine's processes may listen on, for machines behind a firewall."""

from __future__ import annotations

import errno
import re
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from baton.core.errors import ConfigError

T = TypeVar("T")
_RANGE = re.compile(r"(\d{1,5})-(\d{1,5})")
_LARGEST = 65_535
_TAKEN = (errno.EADDRINUSE, errno.EACCES)


class PortsExhaustedError(ConfigError):
    """Every port of ``network.ports`` is taken."""

    code = "ports_exhausted"


@dataclass(frozen=True, slots=True)
class PortRange:
    """Ports from ``first`` to ``last``, both included; 0 to 0 means any free port."""

    first: int = 0
    last: int = 0

    @classmethod
    def parse(cls, text: str | None) -> PortRange:
        """Reads ``20000-20100``; ``None`` means any port.

        Raises:
            ValueError: it is not a range.
        """
        if text is None:
            return cls()
        match = _RANGE.fullmatch(text.strip())
        first, last = (int(match[1]), int(match[2])) if match else (0, 0)
        if not 1 <= first <= last <= _LARGEST:
            raise ValueError(f"{text!r} is not a range of ports; expected one such as 20000-20100")
        return cls(first, last)

    def __str__(self) -> str:
        return f"{self.first}-{self.last}" if self.first else "any port"

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.last + 1))

    def bind(self, host: str, listen: Callable[[int], T]) -> T:
        """Calls ``listen`` with each port that is free at ``host`` until it succeeds, and returns its result.

        Args:
            listen: raises OSError or RuntimeError if the port is taken after all, by a process that started just now.

        Raises:
            PortsExhaustedError: all are taken.
            OSError: this machine does not have the address.
        """
        for port in self:
            if not _is_free(host, port):
                continue
            try:
                return listen(port)
            except (OSError, RuntimeError):  # gRPC raises RuntimeError
                if not self.first:
                    raise
        raise PortsExhaustedError(
            f"All ports of network.ports ({self}) are taken at {host}. A worker needs a port for gRPC, and a decode "
            "worker another one for KV; widen the range, or run fewer workers on this machine."
        )


ANY_PORT = PortRange()


def listen_at(host: str, port: int, backlog: int | None = None) -> socket.socket:
    """A listening socket; IPv6 addresses may be in brackets. Raises OSError if the address is not available."""
    family, _, _, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address[:2], family=family, backlog=backlog)


def _is_free(host: str, port: int) -> bool:
    try:
        listen_at(host, port).close()
    except OSError as error:
        if error.errno in _TAKEN and port:
            return False
        raise
    return True
