"""Tiny models over several ranks, for tests: rank 0 is the test's process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from baton.engine.kv_cache.paged_cache import Allocator
from baton.engine.models.model_loader import load_model
from baton.engine.models.model_source import ModelSource
from baton.engine.parallel.followers import Followers
from baton.engine.parallel.group import RankGroup
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.runner.options import RunnerOptions
from baton.engine.runner.self_check import check_model

BUILDER = "tests.ranked_models:build_runner"
CPU = torch.device("cpu")
BLOCK_SIZE = 8


@dataclass(frozen=True)
class Build:
    """What every rank builds."""

    folder: str
    num_blocks: int = 64
    decoder: str = "transformers"
    kv_cache: str = "native"
    dtype: str = "float32"
    num_threads: int = 1


def build_runner(
    build: Build, group: RankGroup | None, device: torch.device, allocate: Allocator | None = None
) -> ModelRunner:
    """The runner of one rank, checked."""
    torch.set_num_threads(build.num_threads)
    options = RunnerOptions(decoder=build.decoder, kv_cache=build.kv_cache)
    loaded = load_model(ModelSource(build.folder, "tiny"), build.dtype, device, group=group)
    runner = ModelRunner(loaded, build.num_blocks, BLOCK_SIZE, options, allocate=allocate)
    check_model(runner)
    return runner


def save_tiny(folder: Path, model: torch.nn.Module) -> Path:
    model.save_pretrained(folder)  # type: ignore[operator]
    return folder


@contextmanager
def ranked_runner(build: Build, size: int) -> Iterator[tuple[ModelRunner, Followers]]:
    """A runner over ``size`` ranks, and its followers."""
    followers = Followers(size)
    group = None
    try:
        group = followers.start(BUILDER, build, CPU)
        runner = build_runner(build, group, CPU)
        runner.lead(followers)
        yield runner, followers
    finally:
        followers.close()
        if group is not None:
            group.leave()
