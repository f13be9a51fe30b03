"""Bytes through a plain TCP connection on this machine, with which :mod:`benchmarks.kv_path` compares the hand-off."""

from __future__ import annotations

import socket
import time

_HOST = "127.0.0.1"
_TIMEOUT_S = 60.0
_SOCKET_BYTES = 1 << 20
_DONE = b"."


def send_plainly(port: int, num_bytes: int) -> float:
    """Sends bytes; returns the seconds from connecting until the other side has acknowledged everything."""
    data = memoryview(bytes(_SOCKET_BYTES))
    started_s = time.perf_counter()
    with socket.create_connection((_HOST, port), timeout=_TIMEOUT_S) as connection:
        connection.sendall(num_bytes.to_bytes(8, "little"))
        left = num_bytes
        while left:
            size = min(left, _SOCKET_BYTES)
            connection.sendall(data[:size])
            left -= size
        if connection.recv(1) != _DONE:
            raise ConnectionError("the receiver closed the connection before everything had arrived")
    return time.perf_counter() - started_s


def serve_plainly(listener: socket.socket) -> None:
    """Receives what :func:`send_plainly` sends, one connection at a time, until the listener is closed."""
    buffer = bytearray(_SOCKET_BYTES)
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection:
            left = int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "little")
            while left:
                num_read = connection.recv_into(buffer, min(left, _SOCKET_BYTES))
                if not num_read:
                    break
                left -= num_read
            else:
                connection.sendall(_DONE)
