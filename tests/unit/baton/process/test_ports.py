"""Ports from a range."""

from __future__ import annotations

import socket

import pytest

from baton.process.ports import ANY_PORT, PortRange, PortsExhaustedError, listen_at

HOST = "127.0.0.1"


def free_range(length: int) -> PortRange:
    """Consecutive ports that are free now."""
    for first in range(21_000, 30_000, length):
        try:
            for port in range(first, first + length):
                listen_at(HOST, port).close()
        except OSError:
            continue
        return PortRange(first, first + length - 1)
    raise AssertionError("no free ports")


def port_of(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


def test_a_taken_port_is_skipped_and_an_exhausted_range_is_named() -> None:
    ports = free_range(3)
    with listen_at(HOST, ports.first + 1):
        listeners = [ports.bind(HOST, lambda port: listen_at(HOST, port)) for _ in range(2)]
        assert [port_of(listener) for listener in listeners] == [ports.first, ports.last]
        with pytest.raises(PortsExhaustedError, match=rf"network\.ports \({ports}\) are taken at 127\.0\.0\.1"):
            ports.bind(HOST, lambda port: listen_at(HOST, port))
    for listener in listeners:
        listener.close()


@pytest.mark.parametrize("error", [OSError("taken"), RuntimeError("Failed to bind")])
def test_a_port_that_another_process_takes_meanwhile_is_skipped(error: Exception) -> None:
    ports, tried = free_range(2), []

    def listen(port: int) -> int:
        tried.append(port)
        if port == ports.first:
            raise error
        return port

    assert ports.bind(HOST, listen) == ports.last
    assert tried == [ports.first, ports.last]


def test_without_a_range_any_port_is_taken_and_errors_are_unchanged() -> None:
    with ANY_PORT.bind(HOST, lambda port: listen_at(HOST, port)) as listener:
        assert port_of(listener)
    with pytest.raises(OSError, match="assign"):
        ANY_PORT.bind("203.0.113.77", lambda port: listen_at("203.0.113.77", port))


def test_an_address_of_another_machine_is_no_exhausted_range() -> None:
    with pytest.raises(OSError, match="assign"):
        free_range(2).bind("203.0.113.77", lambda port: port)


@pytest.mark.parametrize("text", ["20000", "20000-", "20100-20000", "0-10", "1-70000", "a-b", ""])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="such as 20000-20100"):
        PortRange.parse(text)
