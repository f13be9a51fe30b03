"""A decode step launches as many kernels, and moves as many bytes, as it is known to: both decide what it takes.

The models have the shapes of real ones but for their number of layers, and lie on the meta device.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3Config, Qwen3MoeConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from baton.core.kv_spec import KVEncoding, LayerSpec
from baton.engine.attention.base import ATTENTION_NAME, paged_attention
from baton.engine.models.attention_probe import AttentionLayer
from baton.engine.models.model_loader import LoadedModel
from tests.device_steps import Steps
from tests.kernel_ledger import KernelLedger

ROOT = Path(__file__).resolve().parents[4]
NUM_LAYERS = 2
H100_PROGRAMS = 4 * 132
COMMON: dict[str, Any] = {
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "Llama-3.1-8B": LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_key_value_heads=8, **COMMON
    ),
    "Qwen3-8B": Qwen3Config(
        vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_key_value_heads=8, **COMMON
    ),
    "Qwen3-30B-A3B": Qwen3MoeConfig(
        vocab_size=151936,
        hidden_size=2048,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        num_key_value_heads=4,
        **COMMON,
    ),
}


@dataclass(frozen=True, slots=True)
class Count:
    """Kernels of a layer, those of them that multiply matrices, and kernels outside of the layers."""

    layer: int
    products: int
    outside: int


COUNTS: dict[str, dict[str, Count]] = {
    "5.17": {
        "Llama-3.1-8B": Count(41, 7, 21),
        "Qwen3-8B": Count(57, 7, 21),
        "Qwen3-30B-A3B": Count(80, 7, 21),
    },
    "5.23": {
        "Llama-3.1-8B": Count(41, 7, 21),
        "Qwen3-8B": Count(57, 7, 21),
        "Qwen3-30B-A3B": Count(75, 7, 21),
    },
}
"""Kernels by minor version of transformers. A change that lowers a number is a gain, and changes the table."""


@cache
def model_on_meta(name: str) -> LoadedModel:
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, paged_attention)
    config = CONFIGS[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval().requires_grad_(False)
    spec = LayerSpec(config.num_key_value_heads, config.head_dim, config.head_dim)
    layers = tuple(AttentionLayer(layer.self_attn, spec, None) for layer in model.model.layers)
    return LoadedModel(model, layers, "bfloat16", config.vocab_size, 40960, frozenset(), name)


def booked(name: str, num_seqs: int, context: int, max_keys: int = 40960) -> KernelLedger:
    """A decode step of so many sequences."""
    loaded = model_on_meta(name)
    run = Steps(loaded, num_programs=H100_PROGRAMS).recorded(num_seqs, 1, max_keys)
    with KernelLedger(loaded.model.model.layers, num_seqs * context).open() as ledger:
        run()
    return ledger


def num_bytes(*modules: nn.Module) -> int:
    return sum(weight.nbytes for module in modules for weight in module.parameters())


def test_the_table_covers_the_default_version() -> None:
    pinned = re.search(r"^transformers==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert pinned[1] in COUNTS


@pytest.mark.parametrize("name", CONFIGS)
def test_a_decode_step_launches_the_recorded_number_of_kernels(name: str) -> None:
    version = ".".join(transformers.__version__.split(".")[:2])
    if version not in COUNTS:
        pytest.skip(f"kernels have been counted with transformers {', '.join(COUNTS)}, not with {version}")
    expected, ledger = COUNTS[version][name], booked(name, 64, 1024)
    for layer in range(NUM_LAYERS):
        assert len(ledger.of_layer(layer)) == expected.layer, ledger.names(layer)
        assert sum(kernel.is_product for kernel in ledger.of_layer(layer)) == expected.products
    assert len(ledger.of_layer(None)) == expected.outside, ledger.names(None)


def test_pieces_are_merged_where_sequences_can_be_long_enough_for_several() -> None:
    long, short = booked("Llama-3.1-8B", 64, 1024).names(0), booked("Llama-3.1-8B", 64, 50, max_keys=80).names(0)
    assert long - short == Counter({"merge": 1})
    assert short["attend"] == 1


@pytest.mark.parametrize(
    ("name", "num_seqs", "context", "most"),
    [
        ("Llama-3.1-8B", 1, 1024, 1.008),
        ("Llama-3.1-8B", 64, 1024, 1.08),
        ("Qwen3-8B", 1, 1024, 1.009),
        ("Qwen3-8B", 64, 1024, 1.1),
    ],
)
def test_a_layer_moves_little_besides_its_weights_and_kv(name: str, num_seqs: int, context: int, most: float) -> None:
    ledger, loaded = booked(name, num_seqs, context, max_keys=1024), model_on_meta(name)
    cached = loaded.attention_layers[0].spec.bytes_per_token(2, KVEncoding.NATIVE) * num_seqs * context
    needed = num_bytes(loaded.model.model.layers[0]) + cached
    assert 1 <= sum(kernel.num_bytes for kernel in ledger.of_layer(0)) / needed <= most


@pytest.mark.parametrize(("num_seqs", "most"), [(1, 1.002), (64, 1.08)])
def test_work_after_the_layers_moves_little_besides_the_vocabulary(num_seqs: int, most: float) -> None:
    ledger, loaded = booked("Llama-3.1-8B", num_seqs, 1024, max_keys=1024), model_on_meta("Llama-3.1-8B")
    moved = sum(kernel.num_bytes for kernel in ledger.of_layer(None))
    assert 1 <= moved / num_bytes(loaded.model.lm_head) <= most


def test_one_more_operation_in_a_layer_is_one_more_kernel() -> None:
    layer = model_on_meta("Llama-3.1-8B").model.model.layers[1]
    before = booked("Llama-3.1-8B", 2, 16)
    hook = layer.mlp.register_forward_hook(lambda module, args, output: output.view(output.shape) * 2)
    try:
        after = booked("Llama-3.1-8B", 2, 16)
    finally:
        hook.remove()
    assert after.names(1) - before.names(1) == Counter({"mul": 1})
    assert after.names(0) == before.names(0)
    added = sum(kernel.num_bytes for kernel in after.kernels) - sum(kernel.num_bytes for kernel in before.kernels)
    assert added == 2 * 2 * 4096 * 2  # two rows of bfloat16 read, two written
