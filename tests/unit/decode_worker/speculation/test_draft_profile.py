"""A worker that has just started knows what drafts cost, and nothing of how often they are accepted."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from baton.core.chunk_budget import SchedulerLimits
from baton.core.request import Request, SamplingParams
from baton.engine.async_engine import AsyncEngine
from baton.engine.models.model_loader import prepare_model
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.runner.options import RunnerOptions
from decode_worker.role import DecodeRole
from decode_worker.speculation.registry import assemble_speculation
from tests.drafting import BLOCK_SIZE
from tests.method_drafts import CHAINS, TREES, draft_for
from tests.observers import SeenSteps
from tests.tiny_drafts import tiny_target

LIMITS = SchedulerLimits(chunk_tokens=32, max_num_seqs=4, max_model_len=64)


@pytest.mark.parametrize("method", ["eagle3", "medusa", "draft_model"])
async def test_a_start_measures_drafts_and_learns_nothing_of_their_outcome(method: str, tmp_path: Path) -> None:
    loaded = prepare_model(tiny_target(), "float32")
    draft = draft_for(method, loaded, tmp_path)
    assert draft is not None
    runner = ModelRunner(loaded, 96, BLOCK_SIZE, RunnerOptions(decoder="transformers"), draft=draft.network)
    speculation = assemble_speculation(CHAINS if method == "draft_model" else TREES, runner, draft)
    controller = speculation.controller
    (own,) = (own for own in controller._methods.values() if own.passes is not None)
    request = Request("r", [1, 2], SamplingParams(max_tokens=9))
    expected = own.method.outlook([request], {"r": 4})
    engine = AsyncEngine(
        runner,
        LIMITS,
        verifier=speculation.verifier,
        proposer=controller,
        max_draft_tokens=speculation.max_draft_tokens,
        costs=controller.costs,
    )
    engine.subscribe(seen := SeenSteps())
    engine.start()
    try:
        role = SimpleNamespace(_engine=engine, _max_model_len=LIMITS.max_model_len, _speculation=controller)
        await DecodeRole.profile(cast("DecodeRole", role))
        report = (await engine.stats()).step_costs
    finally:
        await engine.stop()
    assert own.passes is not None
    assert own.passes.ms(1) > 0
    assert {sample.sequences for sample in seen.samples if sample.drafted_tokens} == {1, 4}
    assert own.method.outlook([request], {"r": 4}) == expected
    assert controller.num_drafted == 0
    assert not controller.figures.by_method, "to a reader of figures, the worker has drafted nothing yet"
    assert report.rates.rates(0)[1] == 0, "no draft counts for the tokens of a step"
