"""Nodes that leave or are reserved, as Ray reports them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.controller import node_watch
from cluster.controller.node_watch import NodeWatch
from tests.waiting import until


def make_node(node_id: str, *, alive: bool = True, **labels: str) -> dict[str, Any]:
    return {"NodeID": node_id, "Alive": alive, "Labels": {key.replace("_", "-"): labels[key] for key in labels}}


async def test_live_draining_nodes_are_reported_and_errors_of_ray_are_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes: list[dict[str, Any]] | Exception = RuntimeError("the head is away")
    draining: dict[str, int] = {}
    leaving: list[str] = []

    def list_nodes() -> list[dict[str, Any]]:
        if isinstance(nodes, Exception):
            raise nodes
        return nodes

    accessor = SimpleNamespace(get_draining_nodes=lambda: draining)
    private = SimpleNamespace(state=SimpleNamespace(state=accessor))
    monkeypatch.setattr(node_watch, "ray", SimpleNamespace(nodes=list_nodes, _private=private))
    monkeypatch.setattr(node_watch, "_LOOK_EVERY_S", 0.01)
    watch = NodeWatch(leaving.append)
    task = asyncio.create_task(watch.run())
    try:
        await asyncio.sleep(0.05)
        assert not leaving
        nodes = [make_node("a", baton_pool="decode"), make_node("b"), make_node("c", alive=False)]
        draining.update({"b": 1, "c": 1})
        await until(lambda: len(leaving) > 1)
        assert {*leaving} == {"b"}
        assert watch.has_reserved_nodes
    finally:
        task.cancel()
