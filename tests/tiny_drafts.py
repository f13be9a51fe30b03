"""Tiny draft checkpoints with random weights, in the format of each peer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

HIDDEN = 32
VOCAB = 96
DRAFT_VOCAB = 40
NUM_LAYERS = 8
LAYER: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "hidden_act": "silu",
    "vocab_size": VOCAB,
}
Tensors = dict[str, torch.Tensor]


@dataclass
class TinyDraft:
    """A checkpoint before it is written. Change ``config`` and ``tensors`` to break it."""

    config: dict[str, Any]
    tensors: Tensors = field(default_factory=dict)

    def write(self, folder: Path, name: str = "model.safetensors") -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        if name.endswith(".safetensors"):
            save_file(self.tensors, folder / name)
        else:
            torch.save(self.tensors, folder / name)
        return folder


def tiny_target(num_layers: int = NUM_LAYERS, hidden: int = HIDDEN, vocab: int = VOCAB) -> LlamaForCausalLM:
    """The target of the drafts."""
    torch.manual_seed(0)
    sizes = {**LAYER, "num_hidden_layers": num_layers, "hidden_size": hidden, "vocab_size": vocab}
    return LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False)).eval().requires_grad_(False)


def tiny_draft_lm(num_layers: int = 2, vocab: int = VOCAB, max_positions: int = 128) -> LlamaForCausalLM:
    """A smaller model with the target's vocabulary, or a similar one."""
    torch.manual_seed(1)
    sizes = {**LAYER, "num_hidden_layers": num_layers, "vocab_size": vocab, "max_position_embeddings": max_positions}
    return LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False)).eval().requires_grad_(False)


class _Weights:
    """Draws tensors that are large enough to matter."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def matrix(self, rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=self._generator) * 1.5 * columns**-0.5

    def norm(self, size: int) -> torch.Tensor:
        return 0.5 + torch.rand(size, generator=self._generator)

    def bias(self, size: int) -> torch.Tensor:
        return torch.randn(size, generator=self._generator) * 0.3

    def ids(self, size: int, below: int) -> torch.Tensor:
        return torch.randperm(below, generator=self._generator)[:size].sort().values


def _decoder_layer(
    weights: _Weights, prefix: str, *, wide: bool, norms: tuple[str, ...], qk_norm: bool = False, hidden: int = HIDDEN
) -> Tensors:
    heads, kv_heads, dim, inner = 4, 2, LAYER["head_dim"], LAYER["intermediate_size"]
    width = 2 * hidden if wide else hidden
    tensors = {
        f"{prefix}.self_attn.q_proj.weight": weights.matrix(heads * dim, width),
        f"{prefix}.self_attn.k_proj.weight": weights.matrix(kv_heads * dim, width),
        f"{prefix}.self_attn.v_proj.weight": weights.matrix(kv_heads * dim, width),
        f"{prefix}.self_attn.o_proj.weight": weights.matrix(hidden, heads * dim),
        f"{prefix}.mlp.gate_proj.weight": weights.matrix(inner, hidden),
        f"{prefix}.mlp.up_proj.weight": weights.matrix(inner, hidden),
        f"{prefix}.mlp.down_proj.weight": weights.matrix(hidden, inner),
    }
    if qk_norm:
        tensors |= {f"{prefix}.self_attn.{name}_norm.weight": weights.norm(dim) for name in "qk"}
    return tensors | {f"{prefix}.{name}.weight": weights.norm(hidden) for name in norms}


def tiny_eagle(seed: int = 1, *, num_layers: int = 1, embedding: bool = True, **settings: Any) -> TinyDraft:
    """EAGLE-1/2 as SafeAILab writes it, without norms before the first and after the last layer."""
    weights = _Weights(seed)
    config = {**LAYER, "num_hidden_layers": num_layers, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    config |= settings
    tensors = {"fc.weight": weights.matrix(HIDDEN, 2 * HIDDEN)}
    if config.get("bias", True):
        tensors["fc.bias"] = weights.bias(HIDDEN)
    for index in range(num_layers):
        norms = ("post_attention_layernorm",) if index == 0 else ("input_layernorm", "post_attention_layernorm")
        tensors |= _decoder_layer(weights, f"layers.{index}", wide=False, norms=norms)
    if embedding:
        tensors["embed_tokens.weight"] = weights.matrix(VOCAB, HIDDEN)
    return TinyDraft(config, tensors)


def _eagle3_tensors(
    weights: _Weights,
    first: str,
    flags: Mapping[str, Any],
    *,
    num_layers: int = 1,
    qk_norm: bool = False,
    num_features: int = 3,
    hidden: int = HIDDEN,
    target_hidden: int = HIDDEN,
) -> Tensors:
    tensors = {"fc.weight": weights.matrix(hidden, num_features * target_hidden)}
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    tensors |= _decoder_layer(weights, first, wide=True, norms=norms, qk_norm=qk_norm, hidden=hidden)
    for index in range(1, num_layers):
        tensors |= _decoder_layer(weights, f"layers.{index}", wide=False, norms=norms[1:], qk_norm=qk_norm)
    if flags.get("norm_before_fc"):
        tensors["input_norm.weight"] = weights.norm(num_features * target_hidden)
    if flags.get("fc_norm"):
        tensors |= {f"fc_norm.{index}.weight": weights.norm(target_hidden) for index in range(num_features)}
    ids = weights.ids(DRAFT_VOCAB, VOCAB)
    return tensors | {
        "norm.weight": weights.norm(hidden),
        "lm_head.weight": weights.matrix(DRAFT_VOCAB, hidden),
        "d2t": ids - torch.arange(DRAFT_VOCAB),
        "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, ids, True),
    }


def tiny_eagle3(seed: int = 2, *, num_features: int = 3, **settings: Any) -> TinyDraft:
    """EAGLE-3 as SafeAILab, SpecForge and SGLang write it. ``settings`` go into the flat config."""
    config = {**LAYER, "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}
    config |= {"draft_vocab_size": DRAFT_VOCAB, **settings}
    flags = {**config, **config.get("eagle_config", {})}
    return TinyDraft(config, _eagle3_tensors(_Weights(seed), "midlayer", flags, num_features=num_features))


def tiny_narrow_eagle3(seed: int = 3) -> TinyDraft:
    """An EAGLE-3 head that is half as wide as its target and so has its own embedding."""
    hidden = HIDDEN // 2
    draft = tiny_eagle3(seed, hidden_size=hidden, target_hidden_size=HIDDEN)
    weights = _Weights(seed)
    draft.tensors = _eagle3_tensors(weights, "midlayer", {}, hidden=hidden)
    draft.tensors["embed_tokens.weight"] = weights.matrix(VOCAB, hidden)
    return draft


def tiny_speculators(
    seed: int = 4, *, kind: str = "llama", num_layers: int = 1, layer: Mapping[str, Any] | None = None, **settings: Any
) -> TinyDraft:
    """EAGLE-3 as speculators (vLLM) writes it: the layer's config nested, flags beside it."""
    nested = {**LAYER, "model_type": kind, "num_hidden_layers": num_layers, **(layer or {})}
    config = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": DRAFT_VOCAB,
        "transformer_layer_config": nested,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "target", "architectures": ["LlamaForCausalLM"]},
        },
        **settings,
    }
    qk_norm = kind == "qwen3"
    tensors = _eagle3_tensors(_Weights(seed), "layers.0", config, num_layers=num_layers, qk_norm=qk_norm)
    return TinyDraft(config, tensors)


def tiny_medusa_v1(seed: int = 5, *, num_heads: int = 3, num_blocks: int = 2) -> TinyDraft:
    """The first Medusa format; its config states fewer heads than there are, as published ones do."""
    weights = _Weights(seed)
    tensors: Tensors = {}
    for head in range(num_heads):
        for block in range(num_blocks):
            tensors[f"{head}.{block}.linear.weight"] = weights.matrix(HIDDEN, HIDDEN)
            tensors[f"{head}.{block}.linear.bias"] = weights.bias(HIDDEN)
        tensors[f"{head}.{num_blocks}.weight"] = weights.matrix(VOCAB, HIDDEN)
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "target"}
    return TinyDraft(config, tensors)


def tiny_medusa_vllm(seed: int = 5, *, num_heads: int = 3, num_blocks: int = 2, prefix: str = "") -> TinyDraft:
    """The same heads in vLLM's format."""
    v1 = tiny_medusa_v1(seed, num_heads=num_heads, num_blocks=num_blocks).tensors
    config = {
        "model_type": "medusa",
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "num_heads": num_heads,
        "num_hidden_layers": num_blocks,
        "medusa_fc_bias": True,
    }
    return TinyDraft(config, {prefix + _vllm_medusa_name(name): tensor for name, tensor in v1.items()})


def _vllm_medusa_name(name: str) -> str:
    head, block, *rest = name.split(".")
    return f"blocks.{head}.layers.{block}.{rest[-1]}" if rest[0] == "linear" else f"lm_heads.{head}.weight"
