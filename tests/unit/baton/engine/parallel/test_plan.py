"""Plans are made of empty models, so that a degree is refused before any weight is read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from baton.core.errors import UnsupportedModelError
from baton.engine.models.empty_model import attention_shapes, empty_model
from baton.engine.models.model_loader import prepare_model
from baton.engine.parallel.plan import ShardPlan, make_plan, pattern_of
from tests.tiny_models import CONFIGS, tiny_model


def plan_of(name: str, size: int, **changes: Any) -> ShardPlan:
    config = CONFIGS[name]()
    for key, value in changes.items():
        setattr(config, key, value)
    return make_plan(empty_model(config, torch.float32), size)


def test_patterns_have_a_star_for_the_number_of_a_layer() -> None:
    assert pattern_of("model.layers.17.mlp.w1") == "model.layers.*.mlp.w1"
    assert pattern_of("model.layers.3") == "model.layers.*"


def test_kv_heads_that_ranks_share_are_loaded_whole_and_cut_afterwards() -> None:
    plan = plan_of("llama", 4)  # four heads, two KV heads
    attention = "model.layers.0.self_attn"
    assert plan.style_of(f"{attention}.q_proj") == "colwise"
    assert plan.style_of(f"{attention}.k_proj") == plan.style_of(f"{attention}.v_proj") == "replicate"
    assert plan.attention[attention].heads.kv_of(3, 4) == range(1, 2)


def test_an_uneven_number_of_heads_is_cut_afterwards() -> None:
    plan = plan_of("llama", 2, hidden_size=72, num_attention_heads=9, num_key_value_heads=3)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        assert plan.style_of(f"model.layers.1.self_attn.{name}") == "replicate"
    assert plan.style_of("model.layers.1.mlp.down_proj") == "rowwise"


def test_sinks_need_an_even_number_of_heads() -> None:
    changes = {"num_attention_heads": 6, "num_key_value_heads": 6, "swa_num_attention_heads": 6}
    with pytest.raises(UnsupportedModelError, match=r"sinks has 6 heads.*degrees are: 1, 2, 3, 6\.$"):
        plan_of("mimo_v2_flash", 4, **changes)


@pytest.mark.parametrize(
    ("name", "size", "reason", "degrees"),
    [
        ("llama", 3, r"layers\.0\.self_attn has 4 heads and 2 KV heads", "1, 2, 4"),
        ("gpt_neox", 3, r"query_key_value has 4 heads", "1, 2, 4"),
        ("mixtral", 16, r"has 4 heads and 2 KV heads", "1, 2, 4"),
        ("qwen3_moe", 4, r"experts.gate_up_proj has 24 rows to divide, which is no multiple of 16", "1, 2"),
    ],
)
def test_impossible_degrees_are_refused_with_the_possible_ones(name: str, size: int, reason: str, degrees: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"among {size} ranks: .*{reason}.*degrees are: {degrees}\.$"):
        plan_of(name, size)


def test_a_style_that_is_not_known_is_refused() -> None:
    model = empty_model(CONFIGS["llama"](), torch.float32)
    model._tp_plan["model.layers.*.mlp.up_proj"] = "sequence_parallel"
    with pytest.raises(UnsupportedModelError, match="styles sequence_parallel, which are not supported"):
        make_plan(model, 2)


@pytest.mark.parametrize("name", sorted(set(CONFIGS) - {"jetmoe"}))
def test_the_cache_of_an_empty_model_is_that_of_the_loaded_one(name: str) -> None:
    loaded = prepare_model(tiny_model(name), "float32")
    assert attention_shapes(empty_model(CONFIGS[name]())) == tuple(layer.spec for layer in loaded.attention_layers)


def test_a_model_that_looks_at_its_numbers_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"JetMoeForCausalLM.*without its weights"):
        attention_shapes(empty_model(CONFIGS["jetmoe"]()))
