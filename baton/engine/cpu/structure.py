"""Recognises models that the fused decoder supports, by their parts, whatever their name.

A model with all these parts may still connect them differently; the runner compares results before it uses the fused
decoder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from baton.core.errors import NotFusableError
from baton.engine.models.model_loader import LoadedModel

Rotary = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
DTYPES = (torch.bfloat16, torch.float32)
MAX_SHARE = 64
_LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP_PARTS = {"gate_proj", "up_proj", "down_proj"}
_SETTLED_ROPE = {"default", "linear", "llama3", "yarn"}


@dataclass(frozen=True, slots=True)
class Linear:
    """Weight ``[out, in]`` and bias ``[out]`` of a module.

    Attributes:
        scales: float32 ``[out]``, the scales of int8 rows; float16 for int4, see
            :func:`baton.engine.cpu.quantization.quantize_linear_int4`; ``None`` for a weight of the model's dtype.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    scales: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Norm:
    weight: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Weights of one layer; ``q_norm`` and ``k_norm`` act on each head by itself.

    Attributes:
        hidden_norm: norm of the hidden state beside each token's embedding; only EAGLE-3 heads have it.
    """

    input_norm: Norm
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    q_norm: Norm | None
    k_norm: Norm | None
    post_norm: Norm
    gate: Linear
    up: Linear
    down: Linear
    scaling: float
    hidden_norm: Norm | None = None


@dataclass(frozen=True, slots=True)
class Decoder:
    """A model's weights, in place: only :mod:`baton.engine.cpu.quantization` makes copies.

    Attributes:
        rotary: returns ``[1, n, head_dim]`` cosines and sines, in the dtype of its first argument, for the ``[1, n]``
            positions in its second.
        normed_residual: the residual stream of an EAGLE-3 head starts with the normed hidden state.
    """

    embedding: torch.Tensor
    layers: tuple[DecoderLayer, ...]
    final_norm: Norm
    lm_head: Linear
    rotary: Rotary
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    normed_residual: bool = False

    @property
    def input_size(self) -> int:
        """Width of the input of the layers' projections."""
        return self.embedding.shape[1] * (1 if self.layers[0].hidden_norm is None else 2)

    @property
    def is_quantized(self) -> bool:
        """Whether its linear layers are int8 or int4; the head is int8 then."""
        return self.lm_head.scales is not None

    @property
    def is_grouped(self) -> bool:
        """Whether its layers are int4."""
        scales = self.layers[0].q.scales
        return scales is not None and scales.dtype == torch.float16


def read_decoder(loaded: LoadedModel) -> Decoder:
    """Finds the parts of a model.

    Raises:
        NotFusableError: a part is missing, unknown or misplaced; the message names it.
    """
    model: Any = loaded.model
    if model.device.type != "cpu":
        raise NotFusableError("the fused decoder runs on the CPU only")
    if getattr(model, "is_quantized", False):
        raise NotFusableError("its checkpoint is quantized, and engine.weights is not dequantized")
    if any(layer.sliding_window for layer in loaded.attention_layers):
        raise NotFusableError("some layers attend through a sliding window")
    decoder: Any = _decoder_of(model)
    modules = [_decoder_layer(layer) for layer in decoder.layers]
    if len(modules) != len(loaded.attention_layers):
        raise NotFusableError("not every layer attends")
    head_dim = loaded.attention_layers[0].spec.key_dim
    first = modules[0]
    shape = Decoder(
        embedding=tensor_of(decoder.embed_tokens.weight, "embedding"),
        layers=tuple(modules),
        final_norm=norm_of(decoder.norm),
        lm_head=linear_of(model.get_output_embeddings(), "lm_head"),
        rotary=_rotary(decoder),
        num_heads=first.q.weight.shape[0] // head_dim,
        num_kv_heads=first.k.weight.shape[0] // head_dim,
        head_dim=head_dim,
        intermediate_size=first.gate.weight.shape[0],
    )
    for attention in loaded.attention_layers:
        spec = attention.spec
        if (spec.num_kv_heads, spec.key_dim, spec.value_dim) != (shape.num_kv_heads, *[head_dim] * 2):
            raise NotFusableError("layers differ in their heads")
    check_shapes(shape)
    return shape


def _decoder_of(model: PreTrainedModel) -> Any:
    decoder: Any = model.get_decoder()
    parts = dict(decoder.named_children())
    _expect("the decoder", parts, {"embed_tokens", "layers", "norm", "rotary_emb"})
    _expect("the model", dict(model.named_children()), {model.base_model_prefix, "lm_head"})
    if type(parts["embed_tokens"]) is not nn.Embedding:
        raise NotFusableError(f"the embedding is a {type(parts['embed_tokens']).__name__}")
    return decoder


def _decoder_layer(layer: Any) -> DecoderLayer:
    _expect("a layer", dict(layer.named_children()), _LAYER_PARTS)
    attention, mlp = layer.self_attn, layer.mlp
    _expect("attention", dict(attention.named_children()), _ATTENTION_PARTS, optional=_HEAD_NORMS)
    _expect("the MLP", dict(mlp.named_children()), _MLP_PARTS, optional={"act_fn"})
    activation = getattr(mlp, "act_fn", None)
    if not isinstance(activation, nn.SiLU) and type(activation).__name__ not in ("SiLUActivation", "SiLU"):
        raise NotFusableError(f"the MLP's activation is {type(activation).__name__}")
    norms = [norm_of(getattr(attention, name)) if hasattr(attention, name) else None for name in ("q_norm", "k_norm")]
    return DecoderLayer(
        input_norm=norm_of(layer.input_layernorm),
        q=linear_of(attention.q_proj, "q_proj"),
        k=linear_of(attention.k_proj, "k_proj"),
        v=linear_of(attention.v_proj, "v_proj"),
        o=linear_of(attention.o_proj, "o_proj"),
        q_norm=norms[0],
        k_norm=norms[1],
        post_norm=norm_of(layer.post_attention_layernorm),
        gate=linear_of(mlp.gate_proj, "gate_proj"),
        up=linear_of(mlp.up_proj, "up_proj"),
        down=linear_of(mlp.down_proj, "down_proj"),
        scaling=float(getattr(attention, "scaling", 0.0)),
    )


def _expect(owner: str, parts: dict[str, nn.Module], wanted: set[str], optional: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    missing, unknown = sorted(wanted - parts.keys()), sorted(parts.keys() - wanted - optional)
    if missing or unknown:
        found = [f"no {name}" for name in missing] + [f"an unknown part {name}" for name in unknown]
        raise NotFusableError(f"{owner} has {', '.join(found)}")


def linear_of(module: Any, name: str) -> Linear:
    """A linear layer's tensors; raises :class:`NotFusableError` with ``name`` for any other module."""
    if type(module) is not nn.Linear:
        raise NotFusableError(f"{name} is a {type(module).__name__}")
    bias = None if module.bias is None else tensor_of(module.bias, name)
    return Linear(tensor_of(module.weight, name), bias)


def norm_of(module: Any) -> Norm:
    """An RMS norm's weight and eps; raises :class:`NotFusableError` for any other module."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    names = {name for name, _ in module.named_parameters()}
    if "RMSNorm" not in type(module).__name__ or eps is None or names != {"weight"}:
        raise NotFusableError(f"a norm is a {type(module).__name__}")
    return Norm(tensor_of(module.weight, type(module).__name__), float(eps))


def tensor_of(parameter: torch.Tensor, name: str) -> torch.Tensor:
    """The parameter as a tensor that the program can read; raises :class:`NotFusableError` if it cannot."""
    tensor = parameter.detach()
    if tensor.dtype not in DTYPES or not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise NotFusableError(f"{name} is not a contiguous {' or '.join(map(str, DTYPES))} tensor in main memory")
    return tensor


def _rotary(decoder: Any) -> Rotary:
    kind = getattr(decoder.rotary_emb, "rope_type", None)
    if kind not in _SETTLED_ROPE:
        raise NotFusableError(f"rotary frequencies of the kind {kind} may change with the length")
    rotary: Rotary = decoder.rotary_emb
    return rotary


def check_shapes(decoder: Decoder) -> None:
    """Raises :class:`NotFusableError` when shapes do not match, or dtypes differ."""
    hidden, width = decoder.embedding.shape[1], decoder.input_size
    q, kv = decoder.num_heads * decoder.head_dim, decoder.num_kv_heads * decoder.head_dim
    if decoder.head_dim % 2:
        raise NotFusableError(f"heads have {decoder.head_dim} dimensions")
    if decoder.num_heads // decoder.num_kv_heads > MAX_SHARE or decoder.num_heads % decoder.num_kv_heads:
        raise NotFusableError(f"{decoder.num_heads} query heads share {decoder.num_kv_heads} KV heads")
    if decoder.lm_head.weight.shape[1] != hidden:
        raise NotFusableError(f"lm_head reads {decoder.lm_head.weight.shape[1]} numbers instead of {hidden}")
    tensors = [decoder.embedding, decoder.final_norm.weight, decoder.lm_head.weight]
    for layer in decoder.layers:
        shapes = {
            "q_proj": (layer.q, (q, width)),
            "k_proj": (layer.k, (kv, width)),
            "v_proj": (layer.v, (kv, width)),
            "o_proj": (layer.o, (hidden, q)),
            "gate_proj": (layer.gate, (decoder.intermediate_size, hidden)),
            "up_proj": (layer.up, (decoder.intermediate_size, hidden)),
            "down_proj": (layer.down, (hidden, decoder.intermediate_size)),
        }
        for name, (linear, shape) in shapes.items():
            if tuple(linear.weight.shape) != shape:
                raise NotFusableError(f"{name} has the shape {tuple(linear.weight.shape)} instead of {shape}")
            tensors += [linear.weight] if linear.bias is None else [linear.weight, linear.bias]
        for norm, size in (
            (layer.input_norm, hidden),
            (layer.post_norm, hidden),
            (layer.q_norm, decoder.head_dim),
            (layer.k_norm, decoder.head_dim),
            (layer.hidden_norm, hidden),
        ):
            if norm is not None and norm.weight.shape != (size,):
                raise NotFusableError(f"a norm has the shape {tuple(norm.weight.shape)} instead of ({size},)")
            tensors += [] if norm is None else [norm.weight]
        if (layer.gate.bias is None) != (layer.up.bias is None):
            raise NotFusableError("only one of gate_proj and up_proj has a bias")
        if layer.scaling <= 0:
            raise NotFusableError("attention does not state its scaling")
    if len({tensor.dtype for tensor in tensors}) != 1:
        raise NotFusableError("the weights have different dtypes")
