"""EAGLE heads: a decoder layer that continues the target's own hidden states (arXiv 2401.15077, 2503.01840).

positions            0     1     2     3           feature i and token i+1 make row i, which predicts token i+2
features of target   g0    g1    g2    g3
tokens                     t1    t2    t3    t4    rows (g0,t1) (g1,t2) (g2,t3) (g3,t4), rotary positions 0 1 2 3
next rows: the head's own output replaces the feature, the drafted token replaces the token
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.functional import embedding, rms_norm
from transformers import PreTrainedModel

from baton.core.errors import UnsupportedModelError
from baton.core.kv_spec import LayerSpec
from baton.engine.draft.checkpoint import fingerprint
from baton.engine.draft.layers import Attend, DraftLayer, LayerSettings, RotaryTable, causal_attend
from baton.engine.draft.target_shape import TargetShape
from baton.engine.parallel.layers import whole_embedding, whole_head


@dataclass(frozen=True, slots=True)
class EagleSettings:
    """Structure of a head.

    Attributes:
        version: 1 for EAGLE-1 and EAGLE-2, which share one network; 3 for EAGLE-3 and 3.1.
        layers: sizes of its decoder layers.
        target: sizes of the target.
        feature_layers: which of transformers' ``hidden_states`` the head reads: ``k`` is the residual stream that
            enters layer ``k``, before any norm; or :data:`FINAL_HIDDEN`.
        has_fc: False for an EAGLE-3 head that takes the target's final hidden state directly.
        fc_bias: whether ``fc`` has a bias.
        norm_before_fc: one norm over all features together (3.1).
        fc_norm: a norm over each feature by itself (3.1).
        norm_before_residual: the residual stream starts from the normed hidden state.
        norm_output: the next pass reads the normed output (3.1), else the one before the final norm.
        draft_vocab_size: rows of the head's logits.
        maps_vocabulary: whether draft ids differ from the target's.
        own_embedding: False shares the target's.
        own_lm_head: False shares the target's.
    """

    version: Literal[1, 3]
    layers: LayerSettings
    target: TargetShape
    feature_layers: tuple[int, ...]
    draft_vocab_size: int
    has_fc: bool = True
    fc_bias: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    maps_vocabulary: bool = False
    own_embedding: bool = False
    own_lm_head: bool = True


@dataclass(frozen=True, slots=True)
class _Shared:
    """What the head has not of its own, held outside of the module tree so that it never becomes part of the head."""

    embedding: torch.Tensor | None
    lm_head: nn.Module | None


class EagleHead(nn.Module):
    """Network of an EAGLE head of any version. All shapes may have more leading dimensions.

    Args:
        settings: structure of the head.
        target: its embedding and its lm_head are used where the head has none. Where ranks share the target, all of
            them create the head together.

    Attributes:
        d2t: int64 ``[draft_vocab_size]``, the target's id minus the draft id; zeros until loaded.
        feature_layers: as in the settings; see there.
        feature_layer_choices: possible readings of the checkpoint's layer ids, likeliest first; if there are several,
            see :func:`baton.engine.draft.eagle.eagle_checkpoint.settle_feature_layers`.
    """

    d2t: torch.Tensor

    def __init__(self, settings: EagleSettings, target: PreTrainedModel) -> None:
        super().__init__()
        layers, eps = settings.layers, settings.layers.rms_norm_eps
        size, features = layers.hidden_size, settings.target.hidden_size * len(settings.feature_layers)
        self.settings = settings
        self.feature_layers = settings.feature_layers
        self.feature_layer_choices: tuple[tuple[int, ...], ...] = (settings.feature_layers,)
        self._shared = _Shared(
            None if settings.own_embedding else whole_embedding(target),
            None if settings.own_lm_head else whole_head(target),
        )
        self._rotary = RotaryTable(layers)
        first = settings.version == 1
        if settings.has_fc:
            self.fc = nn.Linear(2 * size if first else features, size, bias=settings.fc_bias)
        if settings.norm_before_fc:
            self.input_norm = nn.RMSNorm(features, eps=eps)
        if settings.fc_norm:
            self.fc_norm = nn.ModuleList(
                nn.RMSNorm(settings.target.hidden_size, eps=eps) for _ in settings.feature_layers
            )
        self.layers = nn.ModuleList(
            DraftLayer(layers, index, fused=not first and index == 0, norms_input=not first or index > 0)
            for index in range(layers.num_layers)
        )
        if not first:
            self.norm = nn.RMSNorm(size, eps=eps)
        if settings.own_embedding:
            self.embed_tokens = nn.Embedding(settings.target.vocab_size, size)
        if settings.own_lm_head:
            self.lm_head = nn.Linear(size, settings.draft_vocab_size, bias=False)
        if settings.maps_vocabulary:
            self.register_buffer("d2t", torch.zeros(settings.draft_vocab_size, dtype=torch.int64))

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    @property
    def hidden_size(self) -> int:
        return self.settings.layers.hidden_size

    @property
    def draft_vocab_size(self) -> int:
        return self.settings.draft_vocab_size

    @property
    def embedding(self) -> torch.Tensor:
        """``[target_vocab_size, hidden_size]``, its own or the target's."""
        return self.embed_tokens.weight if self._shared.embedding is None else self._shared.embedding

    @property
    def vocabulary_head(self) -> nn.Module:
        """The module that computes logits, its own or the target's."""
        return self.lm_head if self._shared.lm_head is None else self._shared.lm_head

    @property
    def is_local(self) -> bool:
        """Whether a row's KV depends only on the row, see :meth:`keys_values`."""
        return len(self.layers) == 1

    @property
    def layer_specs(self) -> tuple[LayerSpec, ...]:
        """Shapes of the head's own KV cache, which may share the target's block ids."""
        layers = self.settings.layers
        return (LayerSpec(layers.num_kv_heads, layers.head_dim, layers.head_dim),) * layers.num_layers

    def fingerprint(self) -> str:
        """Hex digest over everything that the head computes with, in its current dtype. Reads all its weights."""
        settings = {**asdict(self.settings), "feature_layers": self.feature_layers}
        return fingerprint(settings, self.state_dict())

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Fuses the target's features into the head's first hidden state.

        Args:
            features: ``[num_tokens, len(feature_layers) * target_hidden_size]``, in the order of ``feature_layers``.

        Returns:
            ``[num_tokens, hidden_size]``; EAGLE-1 uses its feature unchanged.
        """
        if self.settings.version == 1 or not self.settings.has_fc:
            return features
        if self.settings.norm_before_fc:
            features = self.input_norm(features)
        elif self.settings.fc_norm:
            # One call for all norms: with a row or two, the number of calls determines the time.
            parts = features.reshape(*features.shape[:-1], len(self.fc_norm), -1)
            weights = torch.stack([norm.get_parameter("weight") for norm in self.fc_norm])
            features = (rms_norm(parts, parts.shape[-1:], eps=self.settings.layers.rms_norm_eps) * weights).flatten(-2)
        fused: torch.Tensor = self.fc(features)
        return fused

    def forward(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, attend: Attend = causal_attend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes one pass over rows of token and hidden state.

        Args:
            token_ids: the target's ids ``[num_tokens]``; the row of feature ``i`` has token ``i + 1``.
            hidden: ``[num_tokens, hidden_size]``, from :meth:`fuse` or from an earlier pass.
            positions: int64 ``[num_tokens]``, positions of the features.
            attend: :class:`baton.engine.draft.rows.PagedAttend` while serving; the default attends within the given
                rows.

        Returns:
            The hidden state for the next pass, and the input of :meth:`logits`; both ``[num_tokens, hidden_size]``.
        """
        rotation = self._rotary(positions, hidden.dtype)
        states, residual = self._first_inputs(token_ids, hidden)
        output: torch.Tensor = self.layers[0](states, residual, rotation, attend)
        for layer in list(self.layers)[1:]:
            normed: torch.Tensor = layer.input_layernorm(output)  # type: ignore[operator]
            output = layer(normed, output, rotation, attend)
        if self.settings.version == 1:
            return output, output
        normed = self.norm(output)
        return (normed if self.settings.norm_output else output), normed

    def angles(self, states: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of positions, ``[..., num_tokens, head_dim]`` each, in the dtype of ``states``."""
        cos, sin = self._rotary(positions, states.dtype)
        return cos.squeeze(-2), sin.squeeze(-2)

    def keys_values(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """KV of rows whose outputs are not needed, without attention, feed-forward or logits.

        Only a head of one layer supports it: nothing in its KV depends on earlier rows.

        Returns:
            Keys and values, each ``[num_tokens, num_kv_heads, head_dim]``.

        Raises:
            UnsupportedModelError: the head has several layers.
        """
        if len(self.layers) != 1:
            raise UnsupportedModelError(
                f"a draft head of {len(self.layers)} layers cannot compute KV without its attention."
            )
        states, _ = self._first_inputs(token_ids, hidden)
        attention: Any = self.layers[0].self_attn
        keys, values = attention.keys_values(states, self._rotary(positions, hidden.dtype))
        return keys, values

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits ``[num_tokens, draft_vocab_size]`` from the second output of :meth:`forward`."""
        lm_head: Any = self.vocabulary_head
        logits: torch.Tensor = lm_head(hidden.to(lm_head.weight.dtype))
        return logits

    def to_target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Converts columns of the logits to token ids of the target."""
        return draft_ids + self.d2t[draft_ids] if self.settings.maps_vocabulary else draft_ids

    def _first_inputs(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Input of the first layer's attention, and its residual stream."""
        # The unscaled table: where a target scales its embeddings, heads are trained without the scale.
        embeds = embedding(token_ids, self.embedding).to(hidden.dtype)
        if self.settings.version == 1:
            mixed: torch.Tensor = self.fc(torch.cat((embeds, hidden), dim=-1))
            return mixed, mixed
        first: Any = self.layers[0]
        states, normed = first.fuse(embeds, hidden)
        return states, (normed if self.settings.norm_before_residual else hidden)
