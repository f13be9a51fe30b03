"""Perplexity is that of transformers' own loss, and a precision that loses nothing differs in nothing."""

from __future__ import annotations

from math import exp

import pytest
import torch

from baton.engine.models.model_loader import prepare_model
from baton.engine.runner.model_runner import ModelRunner
from benchmarks.perplexity import Precision, log_probs_of, measure, windows_of
from tests.tiny_models import random_prompts, tiny_model


def test_windows_cover_the_text_and_leave_out_what_predicts_nothing() -> None:
    assert list(windows_of(range(9), 4)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert list(windows_of(range(6), 4)) == [[0, 1, 2, 3], [4, 5]]


def test_perplexity_is_that_of_transformers() -> None:
    model = tiny_model("llama")
    tokens = random_prompts([40])[0]
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        expected = float(model(torch.tensor([tokens]), labels=torch.tensor([tokens])).loss)
    loaded = prepare_model(model, "float32")
    runners = {name: ModelRunner(loaded, 4, 16, weights=name) for name in ("native", "int8", "int4")}
    native, int8, int4 = measure(runners, tokens, 40)
    assert native.perplexity == pytest.approx(exp(expected), rel=1e-4)
    assert (native.num_tokens, native.num_same) == (39, 39)
    assert native.divergence == 0.0
    assert 0.0 < int8.divergence < int4.divergence
    assert log_probs_of(runners["native"], tokens[:5]).shape[0] == 4


def test_precisions_are_read_and_others_refused() -> None:
    assert Precision.parse("float32+int8") == Precision("float32", "int8")
    assert Precision.parse("bfloat16+int4").name == "bfloat16+int4"
    assert Precision.parse("bfloat16").name == "bfloat16"
    assert Precision.parse("bfloat16+kv_int8") == Precision("bfloat16", kv_cache="int8")
    assert Precision.parse("float32+int4+kv_int8").name == "float32+int4+kv_int8"
    for text in ("int8", "bfloat16+int3", "+int8"):
        with pytest.raises(ValueError, match="no precision"):
            Precision.parse(text)
