"""Kinds of attention and KV.

``make test`` computes tokens with one architecture of each kind, and ``make test-thorough`` with all of them.
Every architecture passes the self-check in ``make test``, too, which compares logits.
"""

from __future__ import annotations

import pytest

_LIKE: dict[str, tuple[str, ...]] = {
    # Heads that share keys and values, rotary positions.
    "llama": (
        *("llama_yarn", "ministral3", "qwen2", "qwen3", "gemma", "phi3", "phi", "olmo2", "olmoe", "mixtral"),
        *(
            "qwen2_moe",
            "qwen3_moe",
            "stablelm",
            "cohere",
            "granite",
            "granitemoe",
            "smollm3",
            "nemotron",
            "glm4",
            "jetmoe",
        ),
    ),
    # Heads that share nothing.
    "gpt2": ("gpt_neox", "opt", "biogpt"),
    # One head of keys and values for all.
    "gpt_bigcode": (),
    # A window in the first layer.
    "gemma2": ("ministral", "gemma3_text", "gemma3_multimodal", "olmo3", "cohere2", "exaone4", "afmoe"),
    # A window in the last layer, or in all.
    "qwen2_window": ("mistral", "phimoe", "starcoder2"),
    # Attention sinks.
    "gpt_oss": (),
    # Latent attention.
    "deepseek_v3": ("deepseek_v2",),
    # Keys and values of different sizes.
    "mimo_v2_flash": (),
}
KIND_OF = {name: kind for kind, names in _LIKE.items() for name in (kind, *names)}
"""For each architecture, the one of the same kind that ``make test`` runs."""


def architecture_param(name: str) -> pytest.ParameterSet:
    """A case of a test of architectures."""
    kind = KIND_OF[name]
    marks = () if name == kind else pytest.mark.thorough(covered_by=f"[{kind}]")
    return pytest.param(name, marks=marks)
