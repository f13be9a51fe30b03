"""What a worker checks before it starts the other ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from baton.core.errors import UnsupportedModelError
from baton.engine.parallel.followers import Followers
from cluster.config.config import BatonConfig
from cluster.worker.worker_model import RankTask, load_with_followers
from tests.tiny_models import CONFIGS


def test_an_impossible_degree_is_refused_before_ranks_are_started(tmp_path: Path) -> None:
    CONFIGS["llama"]().save_pretrained(tmp_path)
    config = BatonConfig.from_dict({"model": str(tmp_path)})
    followers = Followers(64)
    task = RankTask("worker", config.to_dict(), "prefill")
    with pytest.raises(UnsupportedModelError, match=r"among 64 ranks.*degrees are: 1, 2"):
        load_with_followers(task, config, followers, torch.device("cpu"))
    assert not followers.pids
    followers.close()
