"""What a model takes, from its config: compared with published counts, hand-made sums, and loaded models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from baton.core.kv_spec import KVEncoding
from baton.core.ranks import share_of
from baton.engine.models.footprint import footprint_of
from baton.engine.models.model_loader import prepare_model
from benchmarks.published_models import MODELS, PublishedModel
from tests.ranked_models import divisible_model
from tests.tiny_models import CONFIGS, build_model

LARGE = ("gpt-oss-120b", "Qwen3-235B-A22B", "Llama-3.1-405B", "DeepSeek-V3")
PUBLISHED = pytest.mark.parametrize(
    "model",
    [
        pytest.param(model, id=name, marks=pytest.mark.thorough(covered_by="[Qwen3-30B-A3B]") if name in LARGE else ())
        for name, model in MODELS.items()
    ],
)
SIZED = sorted(set(CONFIGS) - {"jetmoe"})
DIVIDED = ("llama", "qwen3", "mixtral", "qwen3_moe", "phi3", "gpt_neox", "deepseek_v2", "mimo_v2_flash", "olmo2")


@PUBLISHED
def test_published_models_have_the_published_parameters_and_kv(model: PublishedModel) -> None:
    found = footprint_of(model.config(), "bfloat16")
    assert found.num_parameters == pytest.approx(model.billions * 1e9, rel=0.01)
    assert found.weights == 2 * found.num_parameters
    assert found.kv_per_token == found.whole_kv_per_token == model.kv_bytes


@pytest.mark.parametrize("name", SIZED)
def test_sizes_are_those_of_the_loaded_model(name: str) -> None:
    model = build_model(CONFIGS[name]())
    found = footprint_of(model.config, "float32")
    tensors = {parameter.data_ptr(): parameter.nbytes for parameter in model.parameters()}
    assert found.weights == sum(tensors.values()) == 4 * found.num_parameters
    spec = prepare_model(model, "float32").kv_spec(4)
    assert found.kv_per_token == found.whole_kv_per_token == spec.bytes_per_token


def test_sizes_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    model = build_model(CONFIGS["mixtral"]())
    model.save_pretrained(tmp_path)
    stored = 0
    for file in tmp_path.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            stored += sum(tensors.get_tensor(name).nbytes for name in tensors.keys())  # noqa: SIM118 - not a dict
    assert footprint_of(model.config, "float32").weights == stored


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", DIVIDED)
def test_ranks_share_weights_and_kv(name: str, size: int) -> None:
    config = divisible_model(name).config
    whole, part = footprint_of(config, "float32"), footprint_of(config, "float32", size)
    assert part.num_parameters == whole.num_parameters
    assert part.whole_kv_per_token == whole.kv_per_token
    assert whole.weights / size <= part.weights < whole.weights * 0.75
    keeps_all = name in ("phi3", "olmo2", "deepseek_v2")
    assert (part.kv_per_token == whole.kv_per_token) == keeps_all
    if name in ("llama", "qwen3", "mixtral"):  # two KV heads
        assert part.kv_per_token == whole.kv_per_token // 2


def test_an_uneven_number_of_heads_counts_the_larger_share() -> None:
    config = CONFIGS["llama"]()
    config.hidden_size, config.num_attention_heads, config.num_key_value_heads = 72, 9, 3
    config.head_dim = 8
    whole, part = footprint_of(config, "float32"), footprint_of(config, "float32", 2)
    assert part.kv_per_token == whole.kv_per_token * len(share_of(3, 0, 2)) // 3


def test_fp8_halves_linear_layers_and_int8_halves_kv() -> None:
    config = MODELS["Llama-3.1-8B"].config()
    native, fp8 = footprint_of(config, "bfloat16"), footprint_of(config, "bfloat16", weights="fp8")
    embeddings = 2 * config.vocab_size * config.hidden_size
    linear = native.num_parameters - embeddings
    assert fp8.weights == pytest.approx(2 * embeddings + linear, rel=0.001)
    int8 = footprint_of(config, "bfloat16", encoding=KVEncoding.INT8)
    assert int8.kv_per_token == 32 * 8 * 2 * (128 + 4)


def test_the_config_stays_as_it_was() -> None:
    config = CONFIGS["llama"]()
    before = config.to_dict()
    footprint_of(config, "float32", 2)
    assert config.to_dict() == before
    assert torch.empty(0).device.type == "cpu"
