"""Loads a model for the engine and finds the layout of its cache by running it once."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, GenerationConfig, PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from baton.core.errors import ConfigError, UnsupportedModelError
from baton.core.kv_spec import KVCacheSpec, KVEncoding
from baton.core.ranks import share_of
from baton.engine.attention.base import ATTENTION_NAME, paged_attention
from baton.engine.attention.latent import share_latents
from baton.engine.device.uploads import TORCH_DTYPES
from baton.engine.models.attention_probe import AttentionLayer, probe_attention
from baton.engine.models.empty_model import attention_shapes, empty_model
from baton.engine.models.float32_products import has_bfloat16, speed_up_products
from baton.engine.models.fp8_linear import make_linears_fp8
from baton.engine.models.model_config import CONTEXT_LENGTH_NAMES
from baton.engine.models.model_source import ModelSource
from baton.engine.models.model_weights import load_weights
from baton.engine.models.quantized.schemes import scheme_of
from baton.engine.parallel.group import RankGroup
from baton.engine.parallel.held_part import sample
from baton.engine.parallel.layers import head_size
from baton.engine.parallel.localise import localise
from baton.engine.parallel.plan import ShardPlan, make_plan

_ATTENTION_TYPES = {"full_attention", "sliding_attention", "attention"}
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)
_MAX_SIZE, _MAX_LAYERS = 10_000_000, 1_000
"""Above those of any published model, so that sizes by mistake are refused before tensors are described for them."""
_SAMPLES_PER_TENSOR = 16
_NUM_COMPARED = 32
_CONFIG_FAULTS = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    StrictDataclassError,
)
"""What transformers raises for a config that is missing or has settings of other types or values than expected."""
# Settings about the origin of a config, which do not affect the computation.
_VOLATILE_SETTINGS = frozenset(
    {"_name_or_path", "architectures", "distributed_config", "dtype", "transformers_version"}
)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready for the runner.

    Attributes:
        attention_layers: in the order in which a forward calls them; their index is the cache layer.
        max_model_len: the model's own context length.
        fingerprint: equal for equal weights and config, see :func:`fingerprint_of`; taken before any conversion to fp8.
        weights: ``native``, or ``fp8`` for linear layers of :mod:`baton.engine.models.fp8_linear`.
        weights_error: relative error of some logits caused by these weights alone.
        is_fusable: the fused decoder has given the model's own logits, so that no other comparison is needed.
        group: the ranks among which the model is divided; ``None`` for a whole model.
        heads: with several ranks, the KV heads of each rank, by layer; ``attention_layers`` have those of this one.
    """

    model: PreTrainedModel
    attention_layers: tuple[AttentionLayer, ...]
    dtype_name: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    fingerprint: str
    weights: str = "native"
    weights_error: float = 0.0
    is_fusable: bool = False
    group: RankGroup | None = None
    heads: tuple[tuple[range, ...], ...] = ()

    def kv_spec(
        self, block_size: int, weights: str = "native", encoding: KVEncoding = KVEncoding.NATIVE
    ) -> KVCacheSpec:
        """Layout of this model's cache on this rank, in blocks of ``block_size`` tokens."""
        weights = "native" if weights == "dequantized" else weights  # a matter of loading
        layers = tuple(layer.spec for layer in self.attention_layers)
        return KVCacheSpec(self.fingerprint, self.dtype_name, block_size, layers, weights, encoding=encoding)

    def whole_spec(self, spec: KVCacheSpec) -> KVCacheSpec:
        """The layout with the KV heads of all ranks."""
        if not self.heads:
            return spec
        counts = [max(heads.stop for heads in of_layer) for of_layer in self.heads]
        layers = (replace(layer, num_kv_heads=count) for layer, count in zip(spec.layers, counts, strict=True))
        return replace(spec, layers=tuple(layers))


def pick_device(name: str) -> torch.device:
    """Resolves a device name. ``auto`` takes CUDA when there is one (Ray hides GPUs that it did not grant).

    Returns:
        The CPU, or the first visible GPU by its number: torch refuses to limit the memory of a GPU without one.

    Raises:
        ConfigError: the name is ``cuda``, and no GPU is visible.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            "engine.device is cuda, but no GPU is visible to this worker. Give the pool resources.gpus: 1 "
            "or more, or set engine.device to auto or cpu."
        )
    return torch.device("cuda", 0)


def pick_dtype(name: str, config: Any, device: torch.device, weights: str = "native") -> str:
    """Resolves a dtype name. ``auto`` takes the checkpoint's dtype, but float32 where a CPU has no instructions for it.

    A checkpoint that transformers computes as it is quantized keeps its dtype, outside of which some quantizers fail.

    Served models use :func:`baton.engine.runner.served_model.load_served_model`, which also considers the decoder.
    """
    if name != "auto":
        return name
    stored = stored_dtype(config)
    if device.type == "cpu" and (weights != "native" or scheme_of(config) is None):
        return "bfloat16" if stored == "bfloat16" and has_bfloat16(device) else "float32"
    return stored


def stored_dtype(config: Any) -> str:
    """The dtype in a checkpoint's config; float32 for a dtype that is not supported."""
    stored = str(getattr(config, "dtype", None) or torch.float32).removeprefix("torch.")
    return stored if stored in TORCH_DTYPES else "float32"


def load_model(
    source: ModelSource, dtype: str, device: torch.device, weights: str = "native", group: RankGroup | None = None
) -> LoadedModel:
    """Loads weights and probes the architecture.

    Args:
        weights: ``native`` computes a quantized checkpoint as it is stored; for all other formats it is dequantized.
            ``fp8`` then converts linear layers; ``int8`` and ``int4`` are left to the decoder that computes them.
        group: the ranks among which the model is divided. All load it at the same time, each its part.

    Raises:
        ConfigError: the model cannot be found or read, or fp8 does not support this dtype and device.
        UnsupportedModelError: its architecture cannot run on this engine; the message says why.
    """
    config = load_config(source)
    check_architecture(config)
    dtype_name = pick_dtype(dtype, config, device, weights)
    if group is None:
        model = load_weights(source, config, TORCH_DTYPES[dtype_name], device, weights)
        return prepare_model(model.eval(), dtype_name, weights)
    empty = empty_model(config, TORCH_DTYPES[dtype_name])
    plan = make_plan(empty, group.size)
    shapes = attention_shapes(empty_model(config))
    divided = DistributedConfig(tp_size=group.size, tp_plan=dict(plan.styles))
    model = load_weights(source, config, TORCH_DTYPES[dtype_name], device, weights, divided)
    loaded = prepare_model(model.eval(), dtype_name, weights, plan, group)
    heads = tuple(
        _heads_of(shape.num_kv_heads, layer.spec.num_kv_heads, group.size)
        for shape, layer in zip(shapes, loaded.attention_layers, strict=True)
    )
    return replace(loaded, heads=heads)


def _heads_of(count: int, own: int, size: int) -> tuple[range, ...]:
    """The KV heads of each rank, of ``count``, where one rank has ``own``: all of them if they are not divided."""
    if own == count:
        return (range(count),) * size
    return tuple(share_of(count, rank, size) for rank in range(size))


def prepare_model(
    model: PreTrainedModel,
    dtype_name: str,
    weights: str = "native",
    plan: ShardPlan | None = None,
    group: RankGroup | None = None,
) -> LoadedModel:
    """Like :func:`load_model`, for a model that is on its device already; ``fp8`` changes it in place."""
    check_architecture(model.config)
    fingerprint = fingerprint_of(model, group)
    if plan is not None and group is not None:
        localise(model, plan, group)
    if not getattr(model, "is_quantized", False):  # whose linear layers have forward passes of their own
        speed_up_products(model, model.device)
    share_latents(model)
    # Registering the same function again has no effect, so every model may do it.
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, paged_attention)
    model.requires_grad_(False)
    attention_layers = probe_attention(model)
    loaded = LoadedModel(
        model=model,
        attention_layers=attention_layers,
        dtype_name=dtype_name,
        vocab_size=_vocab_size(model),
        max_model_len=context_length(model.config),
        eos_token_ids=_eos_token_ids(model),
        fingerprint=fingerprint,
        group=group,
    )
    return _with_fp8(loaded) if weights == "fp8" else loaded


def _with_fp8(loaded: LoadedModel) -> LoadedModel:
    """Converts to fp8 and compares with the model before, which no longer exists afterwards."""
    token_ids = check_tokens(_NUM_COMPARED, loaded.vocab_size)
    before = own_logits(loaded.model, token_ids)
    make_linears_fp8(loaded.model)
    if loaded.model.device.type == "cuda":
        torch.cuda.empty_cache()  # the memory of the replaced weights is used for KV
    error = relative_distance(own_logits(loaded.model, token_ids), before)
    return replace(loaded, weights="fp8", weights_error=error)


@torch.inference_mode()
def own_logits(model: PreTrainedModel, token_ids: Sequence[int], first_position: int = 0) -> torch.Tensor:
    """Logits by the model's own attention, float32 ``[num_tokens, vocab_size]``; then switches to paged attention."""
    model.set_attn_implementation("eager")
    try:
        ids = torch.tensor([token_ids], device=model.device)
        positions = torch.arange(first_position, first_position + len(token_ids), device=model.device)[None]
        logits: torch.Tensor = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0]
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
    return logits.float()


def check_tokens(count: int, vocab_size: int) -> list[int]:
    """Some token ids, to compare two ways of computing a model."""
    return [(37 * index + 11) % min(vocab_size, 1000) for index in range(count)]


def relative_distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp_min(1e-9))


def check_architecture(config: Any) -> None:
    """Checks what is known to fail before any weight is loaded.

    Raises:
        UnsupportedModelError: the architecture cannot run on this engine.
        ConfigError: it has impossible sizes.
    """
    kind = type(config).__name__.removesuffix("Config")
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{kind} is an encoder-decoder model; baton serves decoder-only language models.")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModelError(
            f"{kind} has no causal language model in transformers; baton serves decoder-only language models."
        )
    text_config = config.get_text_config(decoder=True)
    if getattr(text_config, "is_causal", True) is False:
        raise UnsupportedModelError(f"{kind} attends in both directions; baton serves causal language models.")
    if getattr(text_config, "attention_chunk_size", None):
        raise UnsupportedModelError(f"{kind} uses chunked attention, which the paged cache does not support.")
    others = sorted(set(getattr(text_config, "layer_types", None) or ()) - _ATTENTION_TYPES)
    if others:
        raise UnsupportedModelError(
            f"{kind} has layers of the kinds {', '.join(others)}, whose state is not a paged KV cache. "
            f"Supported are: {', '.join(sorted(_ATTENTION_TYPES))}."
        )
    for name in _SIZES:
        value = getattr(text_config, name, None)
        largest = _MAX_LAYERS if name == "num_hidden_layers" else _MAX_SIZE
        if isinstance(value, int) and not 1 <= value <= largest:
            raise ConfigError(f"model: {name} in the config.json is {value}; expected a number from 1 to {largest:,}.")


def fingerprint_of(model: PreTrainedModel, group: RankGroup | None = None) -> str:
    """Hex digest over the config and over every parameter's name, shape, dtype and some of its values.

    Independent of the model's location and file format, and of the number of ranks that share it.
    """
    settings = {key: value for key, value in model.config.to_diff_dict().items() if key not in _VOLATILE_SETTINGS}
    digest = hashlib.blake2b(json.dumps(settings, sort_keys=True, default=str).encode(), digest_size=16)
    for name, tensor in sorted(model.state_dict().items()):
        step = max(1, tensor.numel() // _SAMPLES_PER_TENSOR)
        digest.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype}".encode())
        digest.update(sample(tensor, step, group).numpy().tobytes())
    return digest.hexdigest()


def load_config(source: ModelSource) -> Any:
    """Loads a model's config.

    Raises:
        ConfigError: it is missing or unreadable.
        UnsupportedModelError: it needs code that transformers does not contain.
    """
    try:
        return AutoConfig.from_pretrained(source.path, trust_remote_code=False)
    except _CONFIG_FAULTS as error:
        if "trust_remote_code" in str(error):
            raise UnsupportedModelError(
                f"{source.name} needs Python code of its own (auto_map in its config.json), which baton does not run. "
                "Take a model of an architecture that transformers contains."
            ) from error
        text = str(error).rstrip(". \n")
        raise ConfigError(
            f"model: the config of {source.name} could not be read from {source.path}: {text}. Expected a transformers "
            "model folder, a hub id that this machine can reach (with HF_TOKEN for gated models), or a GGUF file."
        ) from error


def _vocab_size(model: PreTrainedModel) -> int:
    size = head_size(model)
    if size is None:
        raise UnsupportedModelError(f"{type(model).__name__} has no language model head; baton serves causal models.")
    return size


def context_length(config: Any) -> int:
    """Tokens that a model of this config takes. Raises :class:`UnsupportedModelError` if the config does not say."""
    text = config.get_text_config(decoder=True)
    for name in CONTEXT_LENGTH_NAMES:
        value = getattr(text, name, None)
        if isinstance(value, int) and value > 0:
            return int(min(value, _longest_static_rope(text)))
    raise UnsupportedModelError(f"{type(config).__name__} has no context length in its configuration.")


def _longest_static_rope(config: Any) -> float:
    """Number of positions whose rotary frequencies do not depend on the rest of the batch.

    LongRoPE changes all frequencies once the longest sequence passes ``original_max_position_embeddings``. Keys that
    are cached already would then be wrong, for their own sequence and for every other one in the step.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    limits = [kind.get("original_max_position_embeddings") for kind in kinds if kind.get("rope_type") == "longrope"]
    return min((limit for limit in limits if limit), default=float("inf"))


def _eos_token_ids(model: PreTrainedModel) -> frozenset[int]:
    found: set[int] = set()
    generation: GenerationConfig | None = model.generation_config
    for config in (generation, model.config.get_text_config(decoder=True)):
        eos = getattr(config, "eos_token_id", None)
        if eos is not None:
            found.update(eos if isinstance(eos, list | tuple) else [eos])
    return frozenset(int(token) for token in found)


def accepts_logits_to_keep(model: PreTrainedModel) -> bool:
    """Whether the model can compute logits for selected tokens only."""
    return "logits_to_keep" in inspect.signature(model.forward).parameters
