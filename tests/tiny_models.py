"""Tiny random-weight models of many architectures, for tests that compare the engine with transformers.

Weights are drawn so that every layer matters and greedy decoding is far from a tie: transformers' own initialisation
gives such flat logits that nearly any attention would pick the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

VOCAB_SIZE = 160
MAX_POSITIONS = 192
WINDOW = 8

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    # With tied embeddings, random weights mostly repeat their last token.
    "tie_word_embeddings": False,
}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LATENT_ATTENTION = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
_GPT2_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": MAX_POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
_LEAST_MARGIN = 1e-4
_CPU = torch.device("cpu")
_ALTERNATING = ["sliding_attention", "full_attention"]


def _config(name: str, **settings: Any) -> Callable[[], PreTrainedConfig]:
    """A config class of transformers by name, with the common sizes unless ``settings`` say otherwise."""
    config_class: Callable[..., PreTrainedConfig] = getattr(transformers, name)
    return lambda: config_class(**{**_SIZES, **settings})


def _gpt2(name: str, **settings: Any) -> Callable[[], PreTrainedConfig]:
    config_class: Callable[..., PreTrainedConfig] = getattr(transformers, name)
    return lambda: config_class(**{**_GPT2_SIZES, **settings})


def _gemma3_multimodal() -> PreTrainedConfig:
    text = _config("Gemma3TextConfig", head_dim=8, sliding_window=WINDOW, layer_types=_ALTERNATING)()
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.Gemma3Config(
        text_config=text.to_dict(),
        vision_config={**vision, "image_size": 28, "patch_size": 14},
        eos_token_id=None,
        tie_word_embeddings=False,
    )


CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": _config("LlamaConfig"),
    "llama_yarn": _config(
        "LlamaConfig",
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ),
    "qwen2": _config("Qwen2Config", tie_word_embeddings=True),
    "qwen2_window": _config(
        "Qwen2Config", use_sliding_window=True, sliding_window=WINDOW, layer_types=_ALTERNATING[::-1]
    ),
    "qwen3": _config("Qwen3Config", head_dim=16),
    "mistral": _config("MistralConfig", sliding_window=WINDOW),
    "ministral": _config("MinistralConfig", head_dim=8, sliding_window=WINDOW, layer_types=_ALTERNATING),
    "ministral3": _config("Ministral3Config", head_dim=8),
    "gemma": _config("GemmaConfig", head_dim=16),
    "gemma2": _config(
        "Gemma2Config",
        head_dim=16,
        sliding_window=WINDOW,
        layer_types=_ALTERNATING,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=30.0,
        query_pre_attn_scalar=24,
    ),
    "gemma3_text": _config("Gemma3TextConfig", head_dim=16, sliding_window=WINDOW, layer_types=_ALTERNATING),
    "gemma3_multimodal": _gemma3_multimodal,
    "phi3": _config("Phi3Config"),
    "phi": _config("PhiConfig"),
    "phimoe": _config("PhimoeConfig", **_EXPERTS, sliding_window=WINDOW),
    "gpt2": _gpt2("GPT2Config"),
    "gpt_bigcode": _gpt2("GPTBigCodeConfig"),
    "gpt_neox": _config("GPTNeoXConfig"),
    "olmo2": _config("Olmo2Config"),
    "olmo3": _config("Olmo3Config", sliding_window=WINDOW, layer_types=_ALTERNATING),
    "olmoe": _config("OlmoeConfig", **_EXPERTS),
    "mixtral": _config("MixtralConfig", **_EXPERTS),
    "qwen2_moe": _config("Qwen2MoeConfig", **_EXPERTS, shared_expert_intermediate_size=24),
    "qwen3_moe": _config("Qwen3MoeConfig", **_EXPERTS, head_dim=8),
    "gpt_oss": _config("GptOssConfig", **_EXPERTS, head_dim=8, sliding_window=WINDOW, layer_types=_ALTERNATING),
    "deepseek_v2": _config("DeepseekV2Config", **_LATENT_ATTENTION),
    "deepseek_v3": _config("DeepseekV3Config", **_LATENT_ATTENTION),
    "stablelm": _config("StableLmConfig"),
    "starcoder2": _config("Starcoder2Config", sliding_window=WINDOW),
    "cohere": _config("CohereConfig", logit_scale=0.5),
    "cohere2": _config("Cohere2Config", logit_scale=0.5, sliding_window=WINDOW, layer_types=_ALTERNATING),
    "granite": _config("GraniteConfig", attention_multiplier=0.3, residual_multiplier=0.7),
    "granitemoe": _config("GraniteMoeConfig", **_EXPERTS),
    "smollm3": _config("SmolLM3Config", no_rope_layers=[1, 0]),
    "opt": _config("OPTConfig", ffn_dim=48, word_embed_proj_dim=32),
    "biogpt": _config("BioGptConfig"),
    "nemotron": _config("NemotronConfig", head_dim=8),
    "glm4": _config("Glm4Config", head_dim=8),
    "exaone4": _config("Exaone4Config", sliding_window=WINDOW, sliding_window_pattern=2, layer_types=_ALTERNATING),
    "mimo_v2_flash": _config(
        "MiMoV2FlashConfig",
        **_EXPERTS,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        head_dim=8,
        sliding_window=WINDOW,
    ),
    "afmoe": _config("AfmoeConfig", **_EXPERTS, head_dim=8, sliding_window=WINDOW, layer_types=_ALTERNATING),
    "jetmoe": _config("JetMoeConfig", **_EXPERTS, kv_channels=8),
}
"""The architectures that the engine supports."""


class NearTieError(Exception):
    """The two likeliest tokens are so close that rounding could decide, so comparing tokens would be meaningless."""


def build_model(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A float32 model on the CPU with reproducible random weights, ready to run."""
    # With eager attention, which all models support: older releases of transformers ignore Gemma 2's cap in sdpa.
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim >= 2:
                parameter.copy_(noise * 1.5 * parameter.shape[-1] ** -0.5)
            else:  # norms, biases and attention sinks keep their scale, but their values differ
                parameter.add_(noise * 0.2)
    # Tests expect outputs of full length unless they set end-of-sequence tokens.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    model.generation_config.do_sample = False
    return model


def tiny_model(name: str = "llama", seed: int = 0) -> PreTrainedModel:
    """A model of :data:`CONFIGS` with random weights."""
    return build_model(CONFIGS[name](), seed)


def random_prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Random prompts of token ids that every tiny model has."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


def reference_tokens(model: PreTrainedModel, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
    """Greedy continuations by ``transformers.generate``, one prompt at a time.

    Raises:
        NearTieError: a continuation has a near tie.
    """
    outputs = []
    for prompt in prompts:
        result = model.generate(
            torch.tensor([list(prompt)], device=model.device),
            max_new_tokens=num_tokens,
            do_sample=False,
            output_scores=True,
            return_dict_in_generate=True,
        )
        first, second = torch.cat(result.scores).topk(2, dim=-1).values.unbind(-1)
        if float((first - second).min()) < _LEAST_MARGIN:
            raise NearTieError(f"decoding a prompt of {len(prompt)} tokens comes within rounding of a tie")
        outputs.append(result.sequences[0, len(prompt) :].tolist())
    return outputs


def model_with_reference(
    name: str, prompts: Sequence[Sequence[int]], num_tokens: int, device: torch.device = _CPU
) -> tuple[PreTrainedModel, list[list[int]]]:
    """A tiny model whose greedy continuations of ``prompts`` have no near ties, and those continuations."""
    for seed in range(10):
        model = tiny_model(name, seed).to(device)
        try:
            return model, reference_tokens(model, prompts, num_tokens)
        except NearTieError:
            continue
    raise NearTieError(f"no seed gives {name} clear decisions for these prompts")
