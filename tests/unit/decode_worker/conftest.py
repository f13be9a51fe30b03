"""The receiving part of a decode worker, for tests of imports."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from baton.engine.runner.model_runner import ModelRunner
from tests.kv_receiver import PROMPT, Receiver, SourceKV, receiver_runner, running_receiver


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return receiver_runner()


@pytest.fixture
async def receiver(runner: ModelRunner) -> AsyncIterator[Receiver]:
    async with running_receiver(runner) as running:
        yield running


@pytest.fixture
async def hasty(runner: ModelRunner) -> AsyncIterator[Receiver]:
    """A receiver that waits only 0.1 s for claims."""
    async with running_receiver(runner, claim_timeout_s=0.1) as running:
        yield running


@pytest.fixture
def source(runner: ModelRunner) -> SourceKV:
    return SourceKV(runner.spec, PROMPT)
