"""The certificates of this node, which follow their files: a renewal needs no restart."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

import grpc

from baton.core.errors import ConfigError
from baton.rpc.certificates import Certificates, read_certificates

logger = logging.getLogger(__name__)

_Stamp = tuple[int, int, int] | None
"""Time of the last change, size and inode of a file; ``None`` if there is none."""


class NodeCertificates:
    """
    Args:
        authority, certificate, key: the files, as for :func:`read_certificates`.

    Raises:
        ConfigError: as :func:`read_certificates`.
    """

    def __init__(self, authority: Path, certificate: Path, key: Path) -> None:
        self._files = (authority, certificate, key)
        self._lock = threading.Lock()  # gRPC asks in threads of its own
        self._stamps = self._stamps_now()
        self._certificates = read_certificates(*self._files)

    def current(self) -> Certificates:
        """What the files hold. While they do not fit each other, it is what they held before."""
        with self._lock:
            stamps = self._stamps_now()
            if stamps != self._stamps:
                self._stamps = stamps
                try:
                    self._certificates = read_certificates(*self._files)
                except ConfigError as error:
                    logger.warning("this process goes on with its earlier certificate: %s", error.message)
                else:
                    logger.info("this process uses the renewed certificate %s", self._files[1])
            return self._certificates

    def _stamps_now(self) -> tuple[_Stamp, ...]:
        return tuple(map(_stamp_of, self._files))


def server_credentials(current: Callable[[], Certificates]) -> grpc.ServerCredentials:
    """Credentials of a server that accepts only clients with a certificate of the cluster.

    Args:
        current: the node's certificates, asked for with each new connection.
    """
    given = current()

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal given
        found = current()
        if found is given:
            return None
        given = found
        return found.server_configuration()

    return grpc.dynamic_ssl_server_credentials(
        given.server_configuration(), renewed, require_client_authentication=True
    )


def _stamp_of(path: Path) -> _Stamp:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
