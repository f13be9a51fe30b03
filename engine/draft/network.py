"""What the engine must know of a draft that keeps state of its own beside the target's."""

from __future__ import annotations

from typing import Protocol

from engine.kv_spec import LayerSpec


class DraftNetwork(Protocol):
    """A network that guesses, with KV in the target's blocks, or built on the target's hidden states, or both.

    Attributes:
        feature_layers: hidden states of the target that it reads; see :class:`engine.feature_tap.FeatureTap`.
        layer_specs: shapes of its KV, layer by layer.
    """

    @property
    def feature_layers(self) -> tuple[int, ...]: ...

    @property
    def layer_specs(self) -> tuple[LayerSpec, ...]: ...

    def fingerprint(self) -> str:
        """Hex digest over everything that it computes with. Costs a pass over its weights."""
        ...
