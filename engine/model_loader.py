"""Loads a model for the engine and finds out what its cache looks like, by watching it run once."""

from __future__ import annotations

import hashlib
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine.attention.base import ATTENTION_NAME, paged_attention
from engine.errors import ConfigError, UnsupportedModelError
from engine.kv_cache import TORCH_DTYPES
from engine.kv_spec import LayerSpec
from engine.model_source import ModelSource

_PROBE_NAME = "baton_probe"
_PROBE_TOKENS = 4
_ATTENTION_TYPES = {"full_attention", "sliding_attention", "attention"}
_SAMPLES_PER_TENSOR = 16


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready for the runner.

    Attributes:
        attention_modules: in the order in which a forward calls them; their index is the cache layer.
        layers: the cache shapes of those modules.
        max_model_len: the model's own context length.
        fingerprint: equal for equal weights and config, see :func:`fingerprint_of`.
    """

    model: PreTrainedModel
    attention_modules: tuple[nn.Module, ...]
    layers: tuple[LayerSpec, ...]
    dtype_name: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    fingerprint: str


def pick_device(name: str) -> torch.device:
    """``auto`` takes CUDA when there is one (Ray hides what it did not grant).

    Raises:
        ConfigError: CUDA was asked for and is not there.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            "engine.device is cuda, but no GPU is visible to this worker. Give the pool resources.gpus: 1, "
            "or set engine.device to auto or cpu."
        )
    return torch.device("cuda")


def pick_dtype(name: str, config: Any, device: torch.device) -> str:
    """``auto`` takes the checkpoint's dtype, except that a CPU without bfloat16 instructions computes in float32."""
    if name != "auto":
        return name
    stored = str(getattr(config, "dtype", None) or torch.float32).removeprefix("torch.")
    if stored not in TORCH_DTYPES:
        stored = "float32"
    if device.type == "cpu":
        has_bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        return "bfloat16" if stored == "bfloat16" and has_bf16 else "float32"
    return stored


def load_model(source: ModelSource, dtype: str, device: torch.device) -> LoadedModel:
    """Loads weights and probes the architecture.

    Raises:
        ConfigError: the model cannot be found or read.
        UnsupportedModelError: its architecture cannot run on this engine; the message says why.
    """
    # Registering the same function again changes nothing, so every load may do it.
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, paged_attention)
    config = _load_config(source)
    check_architecture(config)
    dtype_name = pick_dtype(dtype, config, device)
    model = _load_weights(source, config, TORCH_DTYPES[dtype_name]).to(device).eval()
    return prepare_model(model, dtype_name)


def prepare_model(model: PreTrainedModel, dtype_name: str) -> LoadedModel:
    """Probes a model that is in memory and on its device already. Raises :class:`UnsupportedModelError`."""
    check_architecture(model.config)
    model.requires_grad_(False)
    modules, layers = _probe_attention(model)
    vocab_size = int(model.get_output_embeddings().weight.shape[0])
    return LoadedModel(
        model=model,
        attention_modules=modules,
        layers=layers,
        dtype_name=dtype_name,
        vocab_size=vocab_size,
        max_model_len=_context_length(model.config),
        eos_token_ids=_eos_token_ids(model),
        fingerprint=fingerprint_of(model),
    )


def check_architecture(config: Any) -> None:
    """Raises :class:`UnsupportedModelError` for what can be known before any weight is loaded."""
    kind = type(config).__name__.removesuffix("Config")
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{kind} is an encoder-decoder model; baton serves decoder-only language models.")
    if getattr(config, "is_causal", True) is False:
        raise UnsupportedModelError(f"{kind} attends in both directions; baton serves causal language models.")
    if getattr(config, "attention_chunk_size", None):
        raise UnsupportedModelError(f"{kind} uses chunked attention, which the paged cache does not support.")
    others = sorted(set(getattr(config, "layer_types", None) or ()) - _ATTENTION_TYPES)
    if others:
        raise UnsupportedModelError(
            f"{kind} has layers of the kinds {', '.join(others)}, whose state is not a paged KV cache. "
            f"Supported are: {', '.join(sorted(_ATTENTION_TYPES))}."
        )


def fingerprint_of(model: PreTrainedModel) -> str:
    """Hex digest over every parameter's name, shape, dtype and some of its values; independent of the file format."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(model.state_dict().items()):
        flat = tensor.flatten()
        step = max(1, flat.numel() // _SAMPLES_PER_TENSOR)
        digest.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype}".encode())
        digest.update(flat[::step].float().cpu().numpy().tobytes())
    return digest.hexdigest()


def _load_config(source: ModelSource) -> Any:
    try:
        return AutoConfig.from_pretrained(source.path)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"model: {source.name} could not be read from {source.path}: {error}. "
            "Expected a transformers model folder, a hub id that this machine can reach, or a GGUF file."
        ) from error


def _load_weights(source: ModelSource, config: Any, dtype: torch.dtype) -> PreTrainedModel:
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(source.path, config=config, dtype=dtype)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model: the weights of {source.name} could not be loaded: {error}") from error
    return model


def _probe_attention(model: PreTrainedModel) -> tuple[tuple[nn.Module, ...], tuple[LayerSpec, ...]]:
    """Runs a few tokens through the model with an attention function that records its caller and the shapes."""
    modules: list[nn.Module] = []
    layers: list[LayerSpec] = []
    kind = type(model).__name__

    def record(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        if attention_mask is not None:
            raise UnsupportedModelError(f"{kind} brings its own attention mask, which paged attention cannot honour.")
        if query.shape[1] % key.shape[1]:
            raise UnsupportedModelError(f"{kind} has {query.shape[1]} query heads for {key.shape[1]} KV heads.")
        modules.append(module)
        layers.append(LayerSpec(int(key.shape[1]), int(key.shape[3]), int(value.shape[3])))
        _check_window(model.config, len(modules) - 1, kwargs.get("sliding_window"), kind)
        return value.repeat_interleave(query.shape[1] // key.shape[1], dim=1).transpose(1, 2), None

    ALL_ATTENTION_FUNCTIONS.register(_PROBE_NAME, record)
    try:
        model.set_attn_implementation(_PROBE_NAME)
        token_ids = torch.arange(_PROBE_TOKENS, device=model.device)[None]
        with torch.inference_mode():
            model(input_ids=token_ids, position_ids=token_ids, use_cache=False)
    except UnsupportedModelError:
        raise
    except (ValueError, TypeError, RuntimeError, NotImplementedError, AttributeError, KeyError) as error:
        raise UnsupportedModelError(
            f"{kind} cannot run with pluggable attention ({type(error).__name__}: {error}). "
            "It must be a decoder-only transformers model that uses AttentionInterface."
        ) from error
    finally:
        # transformers offers no way to unregister; a name that is left behind would keep the model alive.
        ALL_ATTENTION_FUNCTIONS._global_mapping.pop(_PROBE_NAME, None)
    if not modules:
        raise UnsupportedModelError(f"{kind} never called its attention interface, so its KV cannot be paged.")
    if len({id(module) for module in modules}) != len(modules):
        raise UnsupportedModelError(f"{kind} runs one attention module more than once per token.")
    expected = getattr(model.config, "num_hidden_layers", len(modules))
    if len(modules) != expected:
        raise UnsupportedModelError(f"{kind} has {expected} layers, but only {len(modules)} attend over a cache.")
    return tuple(modules), tuple(layers)


def _check_window(config: Any, index: int, window: int | None, kind: str) -> None:
    types = getattr(config, "layer_types", None) or ()
    if index < len(types) and types[index] == "sliding_attention" and not window:
        raise UnsupportedModelError(f"{kind}: layer {index} slides, but does not tell its attention the window.")


def _context_length(config: Any) -> int:
    for name in ("max_position_embeddings", "n_positions", "seq_length"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    raise UnsupportedModelError(
        f"{type(config).__name__} states no context length. Set max_model_len in the configuration."
    )


def _eos_token_ids(model: PreTrainedModel) -> frozenset[int]:
    found: set[int] = set()
    generation: GenerationConfig | None = model.generation_config
    for config in (generation, model.config):
        eos = getattr(config, "eos_token_id", None)
        if eos is not None:
            found.update(eos if isinstance(eos, list | tuple) else [eos])
    return frozenset(int(token) for token in found)


def accepts_logits_to_keep(model: PreTrainedModel) -> bool:
    """Whether the model can compute logits for chosen tokens only."""
    return "logits_to_keep" in inspect.signature(model.forward).parameters
