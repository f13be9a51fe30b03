"""Errors that a user sees when Ray does not start."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import ray

from baton.core.errors import ConfigError
from baton.process.worker_environment import worker_variables
from cluster.config.config import BatonConfig
from cluster.controller.launch import Cluster
from cluster.nodes.ray_connection import connect


@pytest.mark.parametrize("raised", [Exception("The current node timed out during startup."), OSError("no space")])
def test_a_local_ray_that_does_not_start_gives_one_message(raised: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray raises the class Exception itself when a machine is so busy that its node is late."""

    def init(**options: object) -> None:
        raise raised

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(ConfigError, match=r"local Ray cluster could not be started: .*try again later"):
        Cluster.start(BatonConfig.from_dict({"router": {"port": 0}}), lambda line: None)


def test_a_local_ray_has_the_environment_of_workers_and_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Actors that need no other one need not wait until Ray has made it."""
    seen: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", {"RAY_worker_niceness": "3", "HOME": str(tmp_path), "RAY_REDIS_ADDRESS": "a:1"})
    monkeypatch.setattr(ray, "init", lambda **options: seen.update(os.environ))
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    assert connect(BatonConfig(), lambda line: None) is not None
    assert seen.items() >= worker_variables().items()
    assert seen["RAY_prestart_worker_first_driver"] == "0"
    assert seen["RAY_worker_niceness"] == "3"
    assert "RAY_REDIS_ADDRESS" not in seen
