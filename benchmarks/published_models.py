"""What well-known models take on each GPU, from their published shapes: ``python -m benchmarks.published_models``.

The shapes are those of the models' own ``config.json`` files on the Hugging Face hub. Prints the table of
``docs/tensor-parallel.md``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import transformers
from transformers import PreTrainedConfig

from baton.core.accelerators import MEMORY_BYTES
from baton.core.errors import UnsupportedModelError
from baton.engine.models.footprint import Footprint, footprint_of
from baton.engine.runner.device_memory import CONTEXT_BYTES

GPUS = ("H100", "H200", "L40S", "A10G")
DEGREES = (1, 2, 4, 8)
_CHUNK_TOKENS, _NUM_ROWS = 8192, 64
_UTILIZATION = 0.9
_LEAST_TOKENS = 8192
_GIB = 2**30
_LATENT: dict[str, Any] = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
}
_QWEN3: dict[str, Any] = {"head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960}
_LLAMA: dict[str, Any] = {"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072}


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """A model's shapes.

    Attributes:
        billions: published number of parameters.
        kv_bytes: KV of one token in bfloat16, computed by hand: layers × KV heads × (key + value size) × 2.
        config_class: name of its config class in transformers.
    """

    billions: float
    kv_bytes: int
    config_class: str
    shapes: dict[str, Any]

    def config(self) -> PreTrainedConfig:
        found: PreTrainedConfig = getattr(transformers, self.config_class)(
            **{"tie_word_embeddings": False, **self.shapes}
        )
        return found


def _sizes(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


MODELS: dict[str, PublishedModel] = {
    "Mistral-7B-v0.3": PublishedModel(
        7.25,
        32 * 8 * 256 * 2,
        "MistralConfig",
        {**_sizes(4096, 14336, 32, 32, 8), "vocab_size": 32768, "sliding_window": None},
    ),
    "Llama-3.1-8B": PublishedModel(8.03, 32 * 8 * 256 * 2, "LlamaConfig", {**_LLAMA, **_sizes(4096, 14336, 32, 32, 8)}),
    "Qwen3-8B": PublishedModel(8.19, 36 * 8 * 256 * 2, "Qwen3Config", {**_QWEN3, **_sizes(4096, 12288, 36, 32, 8)}),
    "phi-4": PublishedModel(
        14.7,
        40 * 10 * 256 * 2,
        "Phi3Config",
        {**_sizes(5120, 17920, 40, 40, 10), "vocab_size": 100352, "max_position_embeddings": 16384, "pad_token_id": 0},
    ),
    "DeepSeek-V2-Lite": PublishedModel(
        15.7,
        27 * (512 + 64) * 2,
        "DeepseekV2Config",
        {
            **_LATENT,
            **_sizes(2048, 10944, 27, 16, 16),
            "moe_intermediate_size": 1408,
            "q_lora_rank": None,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "first_k_dense_replace": 1,
            "vocab_size": 102400,
        },
    ),
    "gemma-2-27b": PublishedModel(
        27.2,
        46 * 16 * 256 * 2,
        "Gemma2Config",
        {**_sizes(4608, 36864, 46, 32, 16), "head_dim": 128, "vocab_size": 256000, "tie_word_embeddings": True},
    ),
    "Qwen3-30B-A3B": PublishedModel(
        30.5,
        48 * 4 * 256 * 2,
        "Qwen3MoeConfig",
        {
            **_QWEN3,
            **_sizes(2048, 6144, 48, 32, 4),
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
        },
    ),
    "Qwen3-32B": PublishedModel(32.8, 64 * 8 * 256 * 2, "Qwen3Config", {**_QWEN3, **_sizes(5120, 25600, 64, 64, 8)}),
    "Mixtral-8x7B": PublishedModel(
        46.7,
        32 * 8 * 256 * 2,
        "MixtralConfig",
        {**_sizes(4096, 14336, 32, 32, 8), "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000},
    ),
    "Llama-3.1-70B": PublishedModel(
        70.6, 80 * 8 * 256 * 2, "LlamaConfig", {**_LLAMA, **_sizes(8192, 28672, 80, 64, 8)}
    ),
    "gpt-oss-120b": PublishedModel(
        116.8,
        36 * 8 * 128 * 2,
        "GptOssConfig",
        {
            **_sizes(2880, 2880, 36, 64, 8),
            "head_dim": 64,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "vocab_size": 201088,
        },
    ),
    "Qwen3-235B-A22B": PublishedModel(
        235.1,
        94 * 4 * 256 * 2,
        "Qwen3MoeConfig",
        {
            **_QWEN3,
            **_sizes(4096, 12288, 94, 64, 4),
            "moe_intermediate_size": 1536,
            "num_experts": 128,
            "num_experts_per_tok": 8,
        },
    ),
    "Llama-3.1-405B": PublishedModel(
        405.9, 126 * 8 * 256 * 2, "LlamaConfig", {**_LLAMA, **_sizes(16384, 53248, 126, 128, 8)}
    ),
    "DeepSeek-V3": PublishedModel(
        671.0,
        61 * (512 + 64) * 2,
        "DeepseekV3Config",
        {
            **_LATENT,
            **_sizes(7168, 18432, 61, 128, 128),
            "moe_intermediate_size": 2048,
            "q_lora_rank": 1536,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 3,
            "vocab_size": 129280,
        },
    ),
}


def footprints(model: PublishedModel) -> dict[int, Footprint]:
    """The footprint in bfloat16 of each degree that is possible."""
    found = {}
    for size in DEGREES:
        try:
            found[size] = footprint_of(model.config(), "bfloat16", size)
        except UnsupportedModelError:
            continue
    return found


def kv_tokens(footprint: Footprint, gpu: str) -> int:
    """Tokens for which a GPU has room beside the weights and a step with a prompt chunk of 8,192 tokens."""
    usable = int(MEMORY_BYTES[gpu] * _UTILIZATION) - CONTEXT_BYTES
    room = usable - footprint.weights - footprint.step_bytes(_CHUNK_TOKENS, _NUM_ROWS)
    return max(0, room // footprint.kv_per_token)


def table() -> Iterator[str]:
    """The lines of the table, in Markdown."""
    yield "| model | parameters | KV per token | " + " | ".join(GPUS) + " |"
    yield "|---|---|---|" + "---|" * len(GPUS)
    for name, model in MODELS.items():
        found = footprints(model)
        cells = []
        for gpu in GPUS:
            room = {size: kv_tokens(footprint, gpu) for size, footprint in found.items()}
            fits = next((size for size, tokens in room.items() if tokens >= _LEAST_TOKENS), None)
            cells.append("-" if fits is None else f"{fits}: {room[fits]:,}")
        whole = found[1]
        size = f"{whole.num_parameters / 1e9:.2f} B | {whole.whole_kv_per_token / 1024:.0f} KiB"
        yield f"| {name} | {size} | {' | '.join(cells)} |"


def main() -> None:
    """Prints the table."""
    for line in table():
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
