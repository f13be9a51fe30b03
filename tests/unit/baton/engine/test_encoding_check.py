"""Before a worker sends KV as int8, it measures how that changes the model's logits."""

from __future__ import annotations

import pytest
import torch

from baton.core.errors import UnsupportedModelError
from baton.core.kv_spec import KVEncoding
from baton.engine.models.model_loader import prepare_model
from baton.engine.runner import self_check
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.runner.self_check import check_encoding, encoding_error
from cluster.config.config import BatonConfig
from cluster.worker.worker_model import with_checked_encoding
from tests.fused_dtypes import FUSED_DTYPES
from tests.tiny_models import tiny_model


def runner_of(name: str, *, broken: bool = False, num_blocks: int = 16, dtype: str = "float32") -> ModelRunner:
    """Broken: one number of each key dwarfs the others, as the biases of some models make it."""
    model = tiny_model(name)
    if broken:
        for layer in model.get_decoder().layers:
            with torch.no_grad():
                layer.self_attn.k_proj.bias[::2] = 1e4
    return ModelRunner(prepare_model(model.to(getattr(torch, dtype)), dtype), num_blocks, 16)


def config(encoding: str) -> BatonConfig:
    return BatonConfig.from_dict({"kv_transfer": {"encoding": encoding}})


@pytest.mark.parametrize("dtype", FUSED_DTYPES)
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_a_model_that_loses_little_passes(name: str, dtype: str) -> None:
    runner = runner_of(name, dtype=dtype)
    assert 0 < encoding_error(runner, KVEncoding.INT8) < 0.05
    check_encoding(runner, KVEncoding.INT8)
    assert encoding_error(runner, KVEncoding.NATIVE) == 0


def test_a_model_that_loses_too_much_fails_under_int8_and_stays_native_under_auto(
    caplog: pytest.LogCaptureFixture,
) -> None:
    runner = runner_of("qwen2", broken=True)
    with pytest.raises(
        UnsupportedModelError, match=r"different logits when its KV is sent as int8.*kv_transfer\.encoding"
    ):
        with_checked_encoding(config("int8"), runner)
    assert with_checked_encoding(config("auto"), runner) == config("native")
    assert "KV is not sent as int8" in caplog.text
    assert with_checked_encoding(config("native"), runner) == config("native")


def test_settings_of_passing_models_are_kept() -> None:
    runner = runner_of("llama")
    for encoding in ("native", "int8", "auto"):
        assert with_checked_encoding(config(encoding), runner) == config(encoding)


@pytest.mark.parametrize("num_blocks", [2, 3])
def test_the_smallest_caches_have_room_for_the_check(num_blocks: int) -> None:
    assert encoding_error(runner_of("llama", num_blocks=num_blocks), KVEncoding.INT8) > 0


def test_nan_logits_fail_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_of("llama")
    monkeypatch.setattr(self_check, "encoding_error", lambda runner, encoding: float("nan"))
    with pytest.raises(UnsupportedModelError):
        check_encoding(runner, KVEncoding.INT8)
