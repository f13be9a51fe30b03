"""Medusa heads: each guesses one further token from the same hidden state (arXiv 2401.10774).

head i: h → residual blocks ``h + SiLU(linear h)`` → lm_head, where h is the target's hidden state after its final norm
at position t; it predicts token t + 2 + i, and the target's own head predicts t + 1.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import silu
from transformers import PreTrainedModel

from baton.core.errors import UnsupportedModelError
from baton.core.kv_spec import LayerSpec
from baton.engine.batch.hidden_states import FINAL_HIDDEN
from baton.engine.draft.checkpoint import check_tensors, fingerprint, read_tensors, write_tensors
from baton.engine.draft.checkpoint_files import CONFIG_NAME, find_checkpoint, read_config
from baton.engine.draft.loaded_target import shape_of
from baton.engine.draft.medusa.medusa_layout import (
    MEDUSA_WEIGHT_NAMES,
    MedusaSettings,
    canonical_names,
    file_names,
    settings_of,
    truncated_size,
)
from baton.engine.draft.target_shape import TargetShape
from baton.engine.parallel.layers import whole_head

MAX_RANKS = 6
"""Guesses of a head that may become nodes of a tree, while serving and in evaluation."""


class _Block(nn.Module):
    def __init__(self, settings: MedusaSettings) -> None:
        super().__init__()
        size = settings.hidden_size
        self.layers = nn.ModuleList(nn.Linear(size, size, bias=settings.bias) for _ in range(settings.num_blocks))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = hidden + silu(layer(hidden))
        return hidden


class MedusaHeads(nn.Module):
    """All heads of one target. Implements :class:`baton.engine.contracts.DraftNetwork`.

    Args:
        target: its lm_head is used when the heads have none.

    Attributes:
        token_map: int64 ``[draft_vocab_size]``, the target's id of each draft id; only with ``maps_vocabulary``.
    """

    token_map: torch.Tensor

    def __init__(self, settings: MedusaSettings, target: PreTrainedModel) -> None:
        super().__init__()
        self.settings = settings
        # In a tuple, so that they do not become submodules. All ranks of a divided target create the heads together.
        self._target = (target, None if settings.num_lm_heads else whole_head(target))
        self.blocks = nn.ModuleList(_Block(settings) for _ in range(settings.num_heads))
        self.lm_heads = nn.ModuleList(
            nn.Linear(settings.hidden_size, settings.draft_vocab_size, bias=False) for _ in range(settings.num_lm_heads)
        )
        if settings.maps_vocabulary:
            self.register_buffer("token_map", torch.zeros(settings.draft_vocab_size, dtype=torch.int64))

    @property
    def target(self) -> PreTrainedModel:
        """The model that the heads draft for."""
        return self._target[0]

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return (FINAL_HIDDEN,)

    @property
    def layer_specs(self) -> tuple[LayerSpec, ...]:
        """Empty: the heads do not attend."""
        return ()

    @property
    def hidden_size(self) -> int:
        return self.settings.hidden_size

    @property
    def num_heads(self) -> int:
        return self.settings.num_heads

    @property
    def draft_vocab_size(self) -> int:
        return self.settings.draft_vocab_size

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target's final hidden states ``[..., hidden_size]`` → logits ``[num_heads, ..., draft_vocab_size]``."""
        return torch.stack([self._lm_head(index)(block(hidden)) for index, block in enumerate(self.blocks)])

    def to_target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Converts columns of the logits to token ids of the target."""
        return self.token_map[draft_ids] if self.settings.maps_vocabulary else draft_ids

    def fingerprint(self) -> str:
        """Hex digest over settings and weights. Reads all weights."""
        return fingerprint(asdict(self.settings), self.state_dict())

    def _lm_head(self, index: int) -> nn.Module:
        _, shared = self._target
        if shared is not None:
            return shared
        return self.lm_heads[min(index, self.settings.num_lm_heads - 1)]


def load_medusa(
    reference: str | Path, target: PreTrainedModel, dtype: torch.dtype, device: torch.device
) -> MedusaHeads:
    """Loads Medusa heads of the first format (``medusa_lm_head.pt``) or of vLLM's.

    Heads and blocks are counted in the tensors, since some configs state fewer than there are.

    Args:
        reference: a folder or a hub id.
        dtype: dtype of the heads' weights and computation.

    Raises:
        ConfigError: the checkpoint is missing or broken.
        UnsupportedModelError: it is something else, or made for another target; the message says what differs.
    """
    folder = find_checkpoint(reference)
    where = str(reference)
    config = read_config(folder) if (folder / CONFIG_NAME).is_file() else {}
    stored = read_tensors(folder, MEDUSA_WEIGHT_NAMES)
    tensors = canonical_names(stored, config, where)
    shape = shape_of(target)
    _select_rows(tensors, config, shape, where)
    settings = settings_of(tensors, shape, where)
    with torch.device("meta"):
        heads = MedusaHeads(settings, target)
    check_tensors(heads.state_dict(), tensors, where, "Medusa heads", file_names(stored, config, where))
    floating = {name: t.to(dtype) if t.is_floating_point() else t.to(torch.int64) for name, t in tensors.items()}
    heads.load_state_dict(floating, assign=True)
    return heads.to(device).eval().requires_grad_(False)


def save_medusa(heads: MedusaHeads, folder: Path, target_name: str) -> None:
    """Writes ``config.json`` and ``model.safetensors`` in vLLM's format.

    Args:
        folder: created if missing; files of an earlier checkpoint in it are replaced.
        target_name: the target's name in the config, a hub id for example.
    """
    settings = heads.settings
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in heads.state_dict().items()}
    is_shared = settings.num_lm_heads == 1
    if is_shared:
        tensors["lm_head.weight"] = tensors.pop("lm_heads.0.weight")
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "base_model_name_or_path": target_name,
        "hidden_size": settings.hidden_size,
        "vocab_size": shape_of(heads.target).vocab_size,
        "truncated_vocab_size": settings.draft_vocab_size,
        "num_heads": settings.num_heads,
        "num_hidden_layers": settings.num_blocks,
        "medusa_fc_bias": settings.bias,
        "original_lm_head": is_shared,
        "torch_dtype": str(heads.dtype).removeprefix("torch."),
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _select_rows(tensors: dict[str, torch.Tensor], config: Mapping[str, Any], target: TargetShape, where: str) -> None:
    """Applies ``token_map``, which is used only where the config truncates the vocabulary."""
    size = truncated_size(config, tensors, target, where)
    if size is None:
        tensors.pop("token_map", None)
        return
    ids = tensors["token_map"].long()
    if int(ids.min()) < 0 or int(ids.max()) >= target.vocab_size or len(set(ids.tolist())) != len(ids):
        raise UnsupportedModelError(
            f"draft checkpoint {where}: token_map must map to {size} different tokens of the target's "
            f"{target.vocab_size}."
        )
    for name, tensor in tensors.items():
        if name.startswith("lm_heads.") and tensor.shape[0] > size and tensor.shape[0] > int(ids.max()):
            tensors[name] = tensor[ids]
