"""The receiving part of a decode worker, for tests of imports."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from baton.engine.runner.model_runner import ModelRunner
from tests.kv_receiver import PROMPT, Receiver, SourceKV, running_receiver


@pytest.fixture
async def hasty(receiver_runner: ModelRunner) -> AsyncIterator[Receiver]:
    """A receiver that waits only 0.1 s for claims."""
    async with running_receiver(receiver_runner, claim_timeout_s=0.1) as running:
        yield running


@pytest.fixture
def source(receiver_runner: ModelRunner) -> SourceKV:
    return SourceKV(receiver_runner.spec, PROMPT)
