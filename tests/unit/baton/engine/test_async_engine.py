"""AsyncEngine: what its users see when the engine itself breaks."""

from __future__ import annotations

import asyncio

import pytest

from baton.core.chunk_budget import SchedulerLimits
from baton.core.errors import ContextLengthError, WorkerLostError
from baton.core.request import Request, SamplingParams
from baton.engine.async_engine import AsyncEngine
from tests.engine_runs import build_runner
from tests.tiny_models import tiny_model
from tests.waiting import TIMEOUT_S


async def test_streams_and_calls_end_when_the_engine_thread_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = AsyncEngine(build_runner(tiny_model("llama"), num_blocks=16), SchedulerLimits(64, 4, 64))

    def break_down() -> list[object]:
        raise RuntimeError("the scheduler has a bug")

    monkeypatch.setattr(engine.scheduler, "schedule", break_down)
    monkeypatch.setattr("threading.excepthook", lambda arguments: None)
    engine.start()
    with pytest.raises(WorkerLostError):
        async for _ in engine.generate(Request("a", [1, 2, 3], SamplingParams())):
            pass
    await asyncio.wait_for(engine.closed.wait(), TIMEOUT_S)
    with pytest.raises(WorkerLostError):
        await engine.stats()
    with pytest.raises(WorkerLostError, match="this worker's engine failed"):
        engine.progress()


def test_requests_that_can_never_fit_are_refused_at_submission() -> None:
    """The check precedes any work for a request, such as a hand-off."""
    engine = AsyncEngine(build_runner(tiny_model("llama"), num_blocks=64), SchedulerLimits(64, 4, 64))
    request = Request("long", [1] * 60, SamplingParams(max_tokens=5))
    with pytest.raises(ContextLengthError, match="context length is 64 tokens, but the request needs 65"):
        engine.check_request(request)
    request.hands_off = True  # needs only its first token here
    engine.check_request(request)
