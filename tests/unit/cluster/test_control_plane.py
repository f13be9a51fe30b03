"""The parts of a router follow the configuration."""

from __future__ import annotations

from unittest.mock import AsyncMock

import pytest

from baton.explain.timelines import TimelineStore
from cluster.config.config import BatonConfig
from cluster.control_plane import ControlPlane
from cluster.registry.workers import WorkerRegistry
from cluster.requests.generation import ModelCard
from tests.credentials import connect


@pytest.mark.parametrize(("least", "is_ready"), [(0, True), (1, False)])
async def test_a_router_without_workers_is_ready_if_a_request_starts_them(least: int, is_ready: bool) -> None:
    pools = {pool: {"min": least} for pool in ("prefill", "decode")}
    config = BatonConfig.from_dict({"autoscaler": {"enabled": True, **pools}})
    plane = ControlPlane(config, WorkerRegistry(connect), AsyncMock())
    router = plane.create_router(ModelCard("fake", 4096, 100_000, 0), TimelineStore(1))
    assert router.is_ready() is is_ready


def test_traffic_is_recorded_only_if_configured() -> None:
    planes = [
        ControlPlane(
            BatonConfig.from_dict({"telemetry": {"recorded_requests": count}}), WorkerRegistry(connect), AsyncMock()
        )
        for count in (0, 5)
    ]
    assert [plane.recorder is not None for plane in planes] == [False, True]
