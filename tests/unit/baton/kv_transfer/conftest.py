"""The receiving end for the tests of all KV transports."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from baton.engine.runner.model_runner import ModelRunner
from tests.kv_receiver import Receiver, receiver_runner, running_receiver


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return receiver_runner()


@pytest.fixture
async def receiver(runner: ModelRunner) -> AsyncIterator[Receiver]:
    async with running_receiver(runner) as running:
        yield running
