"""The store through which ranks find each other."""

from __future__ import annotations

import psutil

from baton.engine.parallel.group import host_store, reach_store


def test_the_store_listens_on_the_loopback_address_only() -> None:
    store = host_store(2, 30.0)
    listening = [each.laddr for each in psutil.Process().net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    assert {address.ip for address in listening if address.port == store.port} == {"127.0.0.1"}
    store.set("name", "value")
    assert reach_store(store.port, 2, 30.0).get("name") == b"value"
