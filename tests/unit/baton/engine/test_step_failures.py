"""A failure of one request after a forward does not affect the other requests of the step."""

from __future__ import annotations

import pytest

from baton.core.request import FinishReason
from baton.engine.contracts import VerifyResult
from baton.engine.engine import Engine
from tests.engine_runs import build_engine, build_runner, greedy, run
from tests.tiny_models import random_prompts, tiny_model
from tests.toy_proposers import Oracle

PROMPTS = random_prompts((4, 9, 13, 6))
NUM_TOKENS = 4


class _Stumbles(Oracle):
    """Drafts nothing, and breaks over one request when that has so many tokens."""

    num_before = 0

    def observe(self, result: VerifyResult) -> None:
        request = result.sequence.request
        if request.request_id == "request-1" and len(request.output_token_ids) == self.num_before:
            raise RuntimeError("a bug")


@pytest.mark.parametrize("num_before", [0, 2, NUM_TOKENS - 1])
def test_a_failed_step_costs_other_requests_no_token(num_before: int, caplog: pytest.LogCaptureFixture) -> None:
    runner = build_runner(tiny_model("llama"))
    expected = run(build_engine(runner), PROMPTS, greedy(NUM_TOKENS))
    proposer = _Stumbles({f"request-{index}": () for index in range(len(PROMPTS))}, "silent")
    proposer.num_before = num_before
    scheduler = build_engine(runner).scheduler
    outcomes = run(Engine(runner, scheduler, proposer=proposer), PROMPTS, greedy(NUM_TOKENS))
    for index, outcome in enumerate(outcomes):
        if index == 1:
            assert outcome.finish_reason is FinishReason.ERROR
            assert "RuntimeError" in str(outcome.outputs[-1].error)
            assert outcome.token_ids == expected[index].token_ids[:num_before]
        else:
            assert outcome.finish_reason is FinishReason.LENGTH
            assert outcome.token_ids == expected[index].token_ids
    assert scheduler.blocks.check([]) == []
    assert "a bug" in caplog.text
