"""The profile of a forward's stages: all of them, in the time that the forward took."""

from __future__ import annotations

import time

import pytest

from baton.engine.cpu.tables import Stage
from baton.engine.models.model_loader import LoadedModel, prepare_model
from baton.engine.runner.model_runner import ModelRunner
from benchmarks.engine_steps import Case, make_plan
from benchmarks.stage_profile import products_of, show, stage_times
from tests.tiny_models import tiny_model


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return prepare_model(tiny_model("llama"), "float32")


@pytest.mark.parametrize("case", [Case(1, 40, 0), Case(3, 1, 24)])
def test_where_a_forward_goes(loaded: LoadedModel, case: Case) -> None:
    runner = ModelRunner(loaded, 16, 16, decoder="fused")
    times_ms = stage_times(runner, case, 3)
    assert list(times_ms) == list(Stage)
    assert all(ms >= 0 for ms in times_ms.values())
    assert all(times_ms[stage] > 0 for stage in products_of(loaded, case))
    assert show(case, times_ms, products_of(loaded, case)).row_count == len(Stage)
    clock = runner.watch_stages()
    assert clock is not None
    batch = runner.build_batch(make_plan(case, runner.cache.num_blocks))
    started_s = time.perf_counter()
    runner.forward(batch)
    assert 0 < sum(clock.stage_ms().values()) <= (time.perf_counter() - started_s) * 1e3


def test_only_the_fused_decoder_has_stages(loaded: LoadedModel) -> None:
    runner = ModelRunner(loaded, 16, 16, decoder="transformers")
    assert runner.watch_stages() is None
    with pytest.raises(ValueError, match="not computed by the fused decoder"):
        stage_times(runner, Case(1, 8, 0), 1)
