"""Medusa heads: each guesses one further token from the same hidden state (arXiv 2401.10774).

head i: h → residual blocks ``h + SiLU(linear h)`` → lm_head, where h is the target's hidden state behind its final
norm at position t; it predicts token t + 2 + i, the target's own head being the one that predicts t + 1.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import silu
from transformers import PreTrainedModel

from engine.draft.checkpoint import (
    CONFIG_NAME,
    WEIGHT_NAMES,
    check_tensors,
    find_checkpoint,
    fingerprint,
    read_config,
    read_tensors,
)
from engine.draft.eagle import FINAL_HIDDEN, TargetShape
from engine.errors import ConfigError, UnsupportedModelError
from engine.kv_spec import LayerSpec

MAX_RANKS = 6
"""Guesses of a head that may become nodes of a tree, while serving and while it is evaluated."""

_WEIGHT_NAMES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", *WEIGHT_NAMES)
_PREFIX = re.compile(r"^medusa_heads?\.")
_V1_BLOCK = re.compile(r"^(\d+)\.(\d+)\.linear\.(weight|bias)$")
_V1_LM_HEAD = re.compile(r"^(\d+)\.(\d+)\.weight$")


@dataclass(frozen=True, slots=True)
class MedusaSettings:
    """
    Attributes:
        num_heads: tokens that are guessed at once.
        num_blocks: residual blocks of each head.
        bias: of the blocks' linear layers.
        draft_vocab_size: rows of each lm_head.
        num_lm_heads: ``num_heads``, 1 when all share one, 0 when they share the target's.
        maps_vocabulary: whether there is a ``token_map``.
    """

    hidden_size: int
    num_heads: int
    num_blocks: int
    bias: bool
    draft_vocab_size: int
    num_lm_heads: int
    maps_vocabulary: bool


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
    """All heads of one target.

    Args:
        target: lends its lm_head when the heads have none.

    Attributes:
        token_map: int64 ``[draft_vocab_size]``, the target's id of each draft id; only with ``maps_vocabulary``.
    """

    token_map: torch.Tensor

    def __init__(self, settings: MedusaSettings, target: PreTrainedModel) -> None:
        super().__init__()
        self.settings = settings
        self._target = (target,)  # in a tuple, so that it is no part of this module
        self.blocks = nn.ModuleList(_Block(settings) for _ in range(settings.num_heads))
        self.lm_heads = nn.ModuleList(
            nn.Linear(settings.hidden_size, settings.draft_vocab_size, bias=False) for _ in range(settings.num_lm_heads)
        )
        if settings.maps_vocabulary:
            self.register_buffer("token_map", torch.zeros(settings.draft_vocab_size, dtype=torch.int64))

    @property
    def target(self) -> PreTrainedModel:
        """What the heads draft for."""
        return self._target[0]

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """See :class:`engine.draft.network.DraftNetwork`."""
        return (FINAL_HIDDEN,)

    @property
    def layer_specs(self) -> tuple[LayerSpec, ...]:
        """The heads do not attend."""
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
        """Columns of the logits as token ids of the target."""
        return self.token_map[draft_ids] if self.settings.maps_vocabulary else draft_ids

    def fingerprint(self) -> str:
        """Hex digest over settings and weights. Costs a pass over the weights."""
        return fingerprint(asdict(self.settings), self.state_dict())

    def _lm_head(self, index: int) -> nn.Module:
        if not self.settings.num_lm_heads:
            shared: Any = self.target.get_output_embeddings()
            module: nn.Module = shared
            return module
        return self.lm_heads[min(index, self.settings.num_lm_heads - 1)]


def load_medusa(
    reference: str | Path, target: PreTrainedModel, dtype: torch.dtype, device: torch.device
) -> MedusaHeads:
    """Loads Medusa heads of the first format (``medusa_lm_head.pt``) or of vLLM's.

    Heads and blocks are counted in the tensors: configs are known to state fewer than there are.

    Args:
        reference: a folder or a hub id.
        dtype: what the heads compute in.

    Raises:
        ConfigError: the checkpoint is missing or broken.
        UnsupportedModelError: it is something else, or made for another target; the message says what differs.
    """
    folder = find_checkpoint(reference)
    where = str(reference)
    config = read_config(folder) if (folder / CONFIG_NAME).is_file() else {}
    tensors = _canonical_names(read_tensors(folder, _WEIGHT_NAMES), config, where)
    shape = TargetShape.of(target)
    _select_rows(tensors, config, shape, where)
    settings = _settings(tensors, shape, where)
    with torch.device("meta"):
        heads = MedusaHeads(settings, target)
    check_tensors(heads.state_dict(), tensors, where, "Medusa heads")
    floating = {name: t.to(dtype) if t.is_floating_point() else t.to(torch.int64) for name, t in tensors.items()}
    heads.load_state_dict(floating, assign=True)
    return heads.to(device).eval().requires_grad_(False)


def save_medusa(heads: MedusaHeads, folder: Path, target_name: str) -> None:
    """Writes ``config.json`` and ``model.safetensors`` in vLLM's format.

    Args:
        folder: is created; files of an earlier checkpoint in it are replaced.
        target_name: what the config calls the target, a hub id for example.
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
        "vocab_size": TargetShape.of(heads.target).vocab_size,
        "truncated_vocab_size": settings.draft_vocab_size,
        "num_heads": settings.num_heads,
        "num_hidden_layers": settings.num_blocks,
        "medusa_fc_bias": settings.bias,
        "original_lm_head": is_shared,
        "torch_dtype": str(heads.dtype).removeprefix("torch."),
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _canonical_names(
    stored: Mapping[str, torch.Tensor], config: Mapping[str, Any], where: str
) -> dict[str, torch.Tensor]:
    """Tensors under vLLM's names, which are those of :class:`MedusaHeads`."""
    tensors = {_PREFIX.sub("", name): tensor for name, tensor in stored.items()}
    if scalars := [name for name, tensor in tensors.items() if tensor.ndim == 0]:
        raise UnsupportedModelError(f"draft checkpoint {where}, read as Medusa heads: {scalars[0]} is a single number.")
    if not any(_V1_BLOCK.match(name) for name in tensors):
        if config.get("original_lm_head"):  # one for all, stored under either name
            shared = tensors.pop("lm_head.weight", None)
            for name in [name for name in tensors if name.startswith("lm_heads.") and name != "lm_heads.0.weight"]:
                del tensors[name]
            if shared is not None:
                tensors["lm_heads.0.weight"] = shared
        return tensors
    found = {}
    for name, tensor in tensors.items():
        if match := _V1_BLOCK.match(name):
            head, block, part = match.groups()
            found[f"blocks.{head}.layers.{block}.{part}"] = tensor
        elif match := _V1_LM_HEAD.match(name):
            found[f"lm_heads.{match[1]}.weight"] = tensor
        else:
            raise UnsupportedModelError(f"draft checkpoint {where}, read as Medusa heads: unexpected: {name}.")
    return found


def _select_rows(tensors: dict[str, torch.Tensor], config: Mapping[str, Any], target: TargetShape, where: str) -> None:
    """Applies ``token_map``, which counts only where the config truncates the vocabulary."""
    size = _size(config, "truncated_vocab_size", target.vocab_size, where)
    token_map = tensors.get("token_map")
    if size >= _size(config, "vocab_size", target.vocab_size, where):
        tensors.pop("token_map", None)
        return
    if token_map is None or tuple(token_map.shape) != (size,):
        raise UnsupportedModelError(
            f"draft checkpoint {where}: the vocabulary is truncated to {size} tokens, but token_map "
            f"{'is missing' if token_map is None else f'has the shape {list(token_map.shape)}'}."
        )
    ids = token_map.long()
    if int(ids.min()) < 0 or int(ids.max()) >= target.vocab_size or len(set(ids.tolist())) != len(ids):
        raise UnsupportedModelError(
            f"draft checkpoint {where}: token_map does not lead to {size} different tokens of the target's "
            f"{target.vocab_size}."
        )
    for name, tensor in tensors.items():
        if name.startswith("lm_heads.") and tensor.shape[0] > size and tensor.shape[0] > int(ids.max()):
            tensors[name] = tensor[ids]


def _settings(tensors: Mapping[str, torch.Tensor], target: TargetShape, where: str) -> MedusaSettings:
    first = tensors.get("blocks.0.layers.0.weight")
    if first is None:
        raise UnsupportedModelError(
            f"draft checkpoint {where} holds no Medusa heads: expected tensors 0.0.linear.weight or "
            "blocks.0.layers.0.weight."
        )
    if first.shape[-1] != target.hidden_size:
        raise UnsupportedModelError(
            f"draft checkpoint {where}: Medusa heads of hidden size {first.shape[-1]}, but the target has "
            f"{target.hidden_size}. Use heads that were trained for this model."
        )
    num_heads = _count(tensors, r"blocks\.(\d+)\.")
    num_lm_heads = _count(tensors, r"lm_heads\.(\d+)\.")
    if num_lm_heads not in (0, 1, num_heads):
        raise UnsupportedModelError(f"draft checkpoint {where} has {num_heads} heads, but {num_lm_heads} lm_heads.")
    maps = "token_map" in tensors
    size = len(tensors["token_map"]) if maps else target.vocab_size
    if not num_lm_heads and maps:
        raise ConfigError(f"draft checkpoint {where}: a truncated vocabulary needs an lm_head, but none is stored.")
    rows = int(tensors["lm_heads.0.weight"].shape[0]) if "lm_heads.0.weight" in tensors else size
    if rows != size:
        raise UnsupportedModelError(
            f"draft checkpoint {where}: Medusa heads for a vocabulary of {rows} tokens, expected {size}. "
            "Use heads that were trained for this model."
        )
    return MedusaSettings(
        hidden_size=target.hidden_size,
        num_heads=num_heads,
        num_blocks=_count(tensors, r"blocks\.0\.layers\.(\d+)\."),
        bias="blocks.0.layers.0.bias" in tensors,
        draft_vocab_size=size,
        num_lm_heads=num_lm_heads,
        maps_vocabulary=maps,
    )


def _count(tensors: Mapping[str, torch.Tensor], pattern: str) -> int:
    """How many there are. Where one is left out, names beyond the count show as unexpected."""
    return len({match[1] for name in tensors if (match := re.match(pattern, name))})


def _size(config: Mapping[str, Any], name: str, default: int, where: str) -> int:
    value = config.get(name)
    if value is None:
        return default
    if type(value) is not int or value < 1:
        raise ConfigError(f"draft checkpoint {where}: {name} is {value!r}, expected a number of tokens.")
    return value
