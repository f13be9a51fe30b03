"""Formats of Medusa checkpoints, determined from config, names and shapes. No torch here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from baton.core.errors import ConfigError, UnsupportedModelError
from baton.engine.draft.checkpoint_files import WEIGHT_NAMES
from baton.engine.draft.target_shape import TargetShape
from baton.engine.draft.tensor_names import FileNames, Shaped, medusa_file_names, without_medusa_prefix

MEDUSA_WEIGHT_NAMES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", *WEIGHT_NAMES)
_V1_BLOCK = re.compile(r"^(\d+)\.(\d+)\.linear\.(weight|bias)$")
_V1_LM_HEAD = re.compile(r"^(\d+)\.(\d+)\.weight$")

AnyShaped = TypeVar("AnyShaped", bound=Shaped)


@dataclass(frozen=True, slots=True)
class MedusaSettings:
    """Structure of a set of Medusa heads.

    Attributes:
        num_heads: number of heads, the tokens that are guessed at once.
        num_blocks: residual blocks of each head.
        bias: whether the blocks' linear layers have a bias.
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


def canonical_names(stored: Mapping[str, AnyShaped], config: Mapping[str, Any], where: str) -> dict[str, AnyShaped]:
    """Tensors under vLLM's names, which are those of :class:`baton.engine.draft.medusa.heads.MedusaHeads`.

    Raises:
        UnsupportedModelError: one of them does not belong to Medusa heads.
    """
    if scalars := [name for name, tensor in stored.items() if tensor.ndim == 0]:
        raise UnsupportedModelError(f"draft checkpoint {where}, read as Medusa heads: {scalars[0]} is a single number.")
    return {name: stored[in_file] for name, in_file in _names(stored, config, where).items()}


def file_names(stored: Iterable[str], config: Mapping[str, Any], where: str) -> FileNames:
    """Names in the file for the tensors of :func:`canonical_names`, and for those that it lacks."""
    names = list(stored)
    return medusa_file_names(_names(names, config, where), is_v1=_is_v1(names))


def _is_v1(stored: Iterable[str]) -> bool:
    return any(_V1_BLOCK.match(without_medusa_prefix(name)) for name in stored)


def _names(stored: Iterable[str], config: Mapping[str, Any], where: str) -> dict[str, str]:
    """Maps canonical names to those of the file."""
    names = {without_medusa_prefix(name): name for name in stored}
    if not _is_v1(names):
        if config.get("original_lm_head"):  # one lm_head for all, stored under either name
            shared = names.pop("lm_head.weight", None)
            for name in [name for name in names if name.startswith("lm_heads.") and name != "lm_heads.0.weight"]:
                del names[name]
            if shared is not None:
                names["lm_heads.0.weight"] = shared
        return names
    found = {}
    for name, in_file in names.items():
        if match := _V1_BLOCK.match(name):
            head, block, part = match.groups()
            found[f"blocks.{head}.layers.{block}.{part}"] = in_file
        elif match := _V1_LM_HEAD.match(name):
            found[f"lm_heads.{match[1]}.weight"] = in_file
        else:
            raise UnsupportedModelError(f"draft checkpoint {where}, read as Medusa heads: unexpected: {in_file}.")
    return found


def truncated_size(
    config: Mapping[str, Any], tensors: Mapping[str, Shaped], target: TargetShape, where: str
) -> int | None:
    """Number of tokens of a truncated vocabulary; ``None`` when the config does not truncate it.

    Raises:
        ConfigError: a size in the config is not a number of tokens.
        UnsupportedModelError: ``token_map`` is missing or has another size.
    """
    size = _size(config, "truncated_vocab_size", target.vocab_size, where)
    if size >= _size(config, "vocab_size", target.vocab_size, where):
        return None
    token_map = tensors.get("token_map")
    if token_map is None or tuple(token_map.shape) != (size,):
        raise UnsupportedModelError(
            f"draft checkpoint {where}: the vocabulary is truncated to {size} tokens, but token_map "
            f"{'is missing' if token_map is None else f'has the shape {list(token_map.shape)}'}."
        )
    return size


def settings_of(tensors: Mapping[str, Shaped], target: TargetShape, where: str) -> MedusaSettings:
    """Derives the structure of the heads of a checkpoint and checks it against the target.

    Args:
        tensors: by canonical name, with lm_heads already reduced to a truncated vocabulary.

    Raises:
        ConfigError: the checkpoint is broken.
        UnsupportedModelError: it holds something else, or heads for another target.
    """
    first = tensors.get("blocks.0.layers.0.weight")
    if first is None:
        raise UnsupportedModelError(
            f"draft checkpoint {where} contains no Medusa heads: expected tensors 0.0.linear.weight or "
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
    size = int(tensors["token_map"].shape[0]) if maps else target.vocab_size
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


def _count(tensors: Mapping[str, Shaped], pattern: str) -> int:
    """Number of distinct indices. After a gap, names beyond the count are reported as unexpected."""
    return len({match[1] for name in tensors if (match := re.match(pattern, name))})


def _size(config: Mapping[str, Any], name: str, default: int, where: str) -> int:
    value = config.get(name)
    if value is None:
        return default
    if type(value) is not int or value < 1:
        raise ConfigError(f"draft checkpoint {where}: {name} is {value!r}, expected a number of tokens.")
    return value
