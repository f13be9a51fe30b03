"""The KV cache's layout, and its fingerprint. Two workers exchange KV only when these are equal. No torch here."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

_ITEM_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
SCALE_BYTES = 4


class KVEncoding(StrEnum):
    """Encoding of KV, in the cache or on the wire."""

    NATIVE = "native"
    """The model's dtype in the cache; on the wire, the cache's own encoding."""
    INT8 = "int8"
    """LOSSY; see :mod:`baton.engine.kv_cache.kv_int8`."""

    def vector_bytes(self, dim: int, item_size: int) -> int:
        """Bytes of one head's key or value for one token."""
        return dim + SCALE_BYTES if self is KVEncoding.INT8 else dim * item_size


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Shapes of one layer's cache: keys ``[num_tokens, num_kv_heads, key_dim]``, values with ``value_dim``."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    def bytes_per_token(self, item_size: int, encoding: KVEncoding) -> int:
        """Bytes of its keys and values for one token."""
        keys, values = (encoding.vector_bytes(dim, item_size) for dim in (self.key_dim, self.value_dim))
        return self.num_kv_heads * (keys + values)


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """The meaning of a KV block's bytes.

    Attributes:
        model_fingerprint: hash over the weights' names, shapes and sampled values, so that two fine-tunes differ.
        dtype: dtype of keys and values, e.g. ``"bfloat16"``.
        block_size: tokens per block.
        layers: one entry per attention layer, in the order in which the model calls them.
        weights: format that the model's weights were converted to; it affects keys and values.
        draft_fingerprint: hash over the draft that keeps KV in the same blocks; empty without one.
        draft_layers: the draft's layers, which follow the model's.
        encoding: encoding of the model's keys and values in the cache; the draft's KV is native.
    """

    model_fingerprint: str
    dtype: str
    block_size: int
    layers: tuple[LayerSpec, ...]
    weights: str = "native"
    draft_fingerprint: str = ""
    draft_layers: tuple[LayerSpec, ...] = ()
    encoding: KVEncoding = KVEncoding.NATIVE

    @property
    def all_layers(self) -> tuple[LayerSpec, ...]:
        return self.layers + self.draft_layers

    def with_draft(self, fingerprint: str, layers: tuple[LayerSpec, ...]) -> KVCacheSpec:
        """Returns the same cache with a draft's KV in addition to the model's."""
        return replace(self, draft_fingerprint=fingerprint, draft_layers=layers)

    def shares_draft_with(self, other: KVCacheSpec) -> bool:
        """Whether both sides keep KV of the same draft, so that it can be sent too."""
        return bool(self.draft_fingerprint) and self.draft_fingerprint == other.draft_fingerprint

    @property
    def item_size(self) -> int:
        return _ITEM_SIZES[self.dtype]

    @property
    def bytes_per_token(self) -> int:
        """Bytes per token of all layers, keys and values, the draft's included."""
        return self.layer_bytes_per_token(0, len(self.all_layers))

    def layer_bytes_per_token(self, layer_start: int, layer_end: int, encoding: KVEncoding = KVEncoding.NATIVE) -> int:
        """Bytes per token of layers ``[layer_start, layer_end)``, as the cache holds them or in another encoding."""
        layers = self.all_layers[layer_start:layer_end]
        return sum(
            layer.bytes_per_token(self.item_size, self.kept_as(index) if encoding is KVEncoding.NATIVE else encoding)
            for index, layer in enumerate(layers, layer_start)
        )

    def kept_as(self, layer: int) -> KVEncoding:
        """The encoding in which the cache holds a layer of :attr:`all_layers`."""
        return self.encoding if layer < len(self.layers) else KVEncoding.NATIVE

    def fingerprint(self) -> str:
        """Hex digest of everything that must be equal to exchange KV: all fields but the draft's."""
        text = json.dumps(asdict(self.with_draft("", ())), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> KVCacheSpec:
        data: dict[str, Any] = json.loads(text)
        layers, draft_layers = (
            tuple(LayerSpec(**layer) for layer in data.pop(name)) for name in ("layers", "draft_layers")
        )
        encoding = KVEncoding(data.pop("encoding"))
        return cls(layers=layers, draft_layers=draft_layers, encoding=encoding, **data)

    def differences(self, other: KVCacheSpec) -> list[str]:
        """Differences of the model's KV from ``other``, in words: ``"dtype: bfloat16 here, float32 there"``.

        Drafts may differ; their KV is not sent then.
        """
        found = [
            f"{name}: {getattr(self, name)} here, {getattr(other, name)} there"
            for name in ("model_fingerprint", "dtype", "block_size", "weights", "encoding")
            if getattr(self, name) != getattr(other, name)
        ]
        if len(self.layers) != len(other.layers):
            found.append(f"number of layers: {len(self.layers)} here, {len(other.layers)} there")
        elif self.layers != other.layers:
            index = next(i for i, pair in enumerate(zip(self.layers, other.layers, strict=True)) if pair[0] != pair[1])
            found.append(f"layer {index}: {self.layers[index]} here, {other.layers[index]} there")
        return found
