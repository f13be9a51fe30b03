"""The runners that unit tests share, and the receiving end of a hand-off."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from baton.engine.runner.model_runner import ModelRunner
from tests.engine_runs import build_runner
from tests.kv_receiver import NUM_BLOCKS, Receiver, running_receiver
from tests.tiny_models import tiny_model


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    """A tiny Llama with room for 2,048 tokens."""
    return build_runner(tiny_model("llama"))


@pytest.fixture(scope="module")
def receiver_runner() -> ModelRunner:
    """The same model with few blocks, for the receiving end of a hand-off."""
    return build_runner(tiny_model("llama"), NUM_BLOCKS)


@pytest.fixture
async def receiver(receiver_runner: ModelRunner) -> AsyncIterator[Receiver]:
    async with running_receiver(receiver_runner) as running:
        yield running
