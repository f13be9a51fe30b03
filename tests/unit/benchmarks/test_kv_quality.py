"""What int8 costs is measured behind a prompt alone, and native KV costs nothing."""

from __future__ import annotations

import pytest
import torch

from baton.core.kv_spec import KVEncoding
from baton.engine.models.model_loader import prepare_model
from baton.engine.runner.model_runner import ModelRunner
from benchmarks.kv_quality import log_probs_behind, measure
from benchmarks.perplexity import log_probs_of
from tests.tiny_models import random_prompts, tiny_model


@pytest.fixture
def runner() -> ModelRunner:
    return ModelRunner(prepare_model(tiny_model("llama"), "float32"), 4, 16)


@pytest.mark.parametrize("size", [4, 5, 40])
def test_native_predictions_are_those_of_the_window_in_one_step(runner: ModelRunner, size: int) -> None:
    window = random_prompts([size])[0]
    found = log_probs_behind(runner, window, KVEncoding.NATIVE)
    expected = log_probs_of(runner, window)[size // 2 :]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert len(found) == len(window[size // 2 + 1 :])


def test_int8_is_near_and_not_the_same(runner: ModelRunner) -> None:
    native, int8 = measure(runner, random_prompts([100])[0], 40)
    assert native.num_tokens == int8.num_tokens == 19 + 19 + 9
    assert native.divergence == 0.0
    assert 0.0 < int8.divergence / int8.num_tokens < 0.01
    assert (native.precision, int8.precision) == ("float32, KV native", "float32, KV int8")
