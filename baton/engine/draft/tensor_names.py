"""Names of a draft checkpoint's tensors in its file, for messages. No torch here.

Checkpoints of one kind are compared under canonical names, which users do not know.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

FileNames = Callable[[str], str]
"""Maps a canonical name to the name in the file, or to the name that a missing tensor should have there."""

_WRAPPER = "model."
_FIRST_LAYER, _ONLY_LAYER = "layers.0.", "midlayer."
# Tensors that are outside the wrapped model in checkpoints that have one.
_UNWRAPPED = ("lm_head", "d2t", "t2d")
_MEDUSA_PREFIX = re.compile(r"^medusa_heads?\.")
_MEDUSA_V1_LM_HEAD = re.compile(r"^(\d+)\.(\d+)\.weight$")
_MEDUSA_PART = re.compile(r"^blocks\.(\d+)\.layers\.(\d+)\.(\w+)$")
_MEDUSA_LM_HEAD = re.compile(r"^lm_heads\.(\d+)\.weight$")


def canonical_eagle_name(stored: str) -> str:
    """The name in :class:`baton.engine.draft.eagle.head.EagleHead` for a tensor of the file."""
    name = stored.removeprefix(_WRAPPER)
    return _FIRST_LAYER + name.removeprefix(_ONLY_LAYER) if name.startswith(_ONLY_LAYER) else name


def eagle_file_names(stored: Iterable[str]) -> FileNames:
    """Returns the names for a checkpoint of an EAGLE head whose tensors are ``stored``."""
    names = list(stored)
    known = {canonical_eagle_name(name): name for name in names}
    has_midlayer = any(name.removeprefix(_WRAPPER).startswith(_ONLY_LAYER) for name in names)

    def spelled(canonical: str) -> str:
        if canonical in known:
            return known[canonical]
        name = canonical
        if has_midlayer and name.startswith(_FIRST_LAYER):
            name = _ONLY_LAYER + name.removeprefix(_FIRST_LAYER)
        if _first_part(name) in _UNWRAPPED:
            return name
        others = [other for other in names if _first_part(other) not in _UNWRAPPED]
        alike = [other for other in others if _first_part(other.removeprefix(_WRAPPER)) == _first_part(name)] or others
        return _WRAPPER + name if alike and all(other.startswith(_WRAPPER) for other in alike) else name

    return spelled


def without_medusa_prefix(stored: str) -> str:
    """Removes the prefix ``medusa_heads.`` that some checkpoints of Medusa heads have."""
    return _MEDUSA_PREFIX.sub("", stored)


def medusa_file_names(known: Mapping[str, str], *, is_v1: bool) -> FileNames:
    """Returns the names for a checkpoint of Medusa heads.

    Args:
        known: canonical names → those of the file.
        is_v1: the file is in the first format of such heads.
    """
    prefixes = [match[0] for name in known.values() if (match := _MEDUSA_PREFIX.match(name))]
    prefix = prefixes[0] if prefixes else ""
    bare = [without_medusa_prefix(name) for name in known.values()]
    lm_heads = [int(match[2]) for name in bare if (match := _MEDUSA_V1_LM_HEAD.match(name))]
    blocks = [int(match[2]) + 1 for name in known if (match := _MEDUSA_PART.match(name))]
    lm_head_number = max(lm_heads or blocks, default=0)

    def spelled(canonical: str) -> str:
        if canonical in known:
            return known[canonical]
        name = canonical
        if is_v1 and (match := _MEDUSA_PART.match(canonical)):
            name = f"{match[1]}.{match[2]}.linear.{match[3]}"
        elif is_v1 and (match := _MEDUSA_LM_HEAD.match(canonical)):
            name = f"{match[1]}.{lm_head_number}.weight"
        return prefix + name

    return spelled


def _first_part(name: str) -> str:
    return name.partition(".")[0]


class Shaped(Protocol):
    """A tensor, or the shape of one that was not read."""

    @property
    def ndim(self) -> int: ...

    @property
    def shape(self) -> Sequence[int]: ...
