"""Refuses a draft that does not fit its target before any weights are loaded. No torch here.

The loaders check everything; checks of config, names and shapes run here first, by the same functions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.core.errors import UnsupportedModelError
from baton.engine.draft.checkpoint_files import (
    CONFIG_NAME,
    WEIGHT_NAMES,
    StoredTensor,
    find_checkpoint,
    read_config,
    read_shapes,
    weights_file,
)
from baton.engine.draft.eagle.eagle_layout import (
    EagleFormat,
    canonical_names,
    check_sizes,
    format_of,
    layer_config_of,
    read_layout,
)
from baton.engine.draft.medusa.medusa_layout import MEDUSA_WEIGHT_NAMES, settings_of, truncated_size
from baton.engine.draft.medusa.medusa_layout import canonical_names as canonical_medusa_names
from baton.engine.draft.references import check_method, draft_folder, kind_of, resolve_draft
from baton.engine.draft.target_shape import TargetShape
from baton.engine.draft.tensor_names import eagle_file_names
from baton.engine.models.model_config import json_object, read_model_config
from baton.engine.models.model_source import resolve_model

_TOKENIZER_NAME = "tokenizer.json"


def check_draft(
    reference: str, method: str | None, model: str, model_folder: Path, key: str = "speculation.method"
) -> None:
    """Fetches the draft of ``speculation.draft`` if needed, and compares it with the target. Reads no weights.

    Args:
        reference: as for :func:`baton.engine.draft.references.resolve_draft`.
        method: the configured method that may need a draft, and ``key`` the key that names it.
        model: the target, as the configuration names it.
        model_folder: folder of the target.

    Raises:
        ConfigError: the draft is missing or broken, or the method needs another one.
        UnsupportedModelError: it belongs to another target or is of a kind that baton does not support.
        ModelUnavailableError: a draft model cannot be fetched or converted.
    """
    found = resolve_draft(reference, model, method)
    if found is None:
        check_method(method, None, None, key)
        return
    target = TargetShape.of_config(read_model_config(model_folder))
    kind: str | None = kind_of(found)
    if kind == "medusa":
        _check_medusa(found, target)
    elif kind == "draft_model":
        _check_draft_model(str(found), model_folder)
    else:
        kind = _check_eagle(found, target)
    if kind is not None:
        check_method(method, kind, str(found), key)


def _check_eagle(reference: str | Path, target: TargetShape | None) -> str | None:
    """The method that the head is for; ``None`` if the weights' names cannot be read."""
    folder, where = find_checkpoint(reference), str(reference)
    config = read_config(folder)
    stored = read_shapes(folder)
    if stored is None:  # pickled
        if target is not None:
            layers = config.get("transformer_layer_config", config)
            sizes = layers if isinstance(layers, Mapping) else {}
            check_sizes(config, _size(sizes, "vocab_size"), _size(sizes, "hidden_size"), target, where)
        return None
    tensors = canonical_names(stored)
    kind = format_of(config, tensors, where)
    layers = layer_config_of(config, tensors, kind, where)
    if target is not None:
        hidden_size = _size(layers, "hidden_size")
        check_sizes(config, _size(layers, "vocab_size"), hidden_size, target, where)
        read_layout(config, tensors, hidden_size, target, kind, where, eagle_file_names(stored))
    return "eagle" if kind is EagleFormat.EAGLE else "eagle3"


def _check_medusa(reference: str | Path, target: TargetShape | None) -> None:
    folder, where = find_checkpoint(reference), str(reference)
    config = read_config(folder) if (folder / CONFIG_NAME).is_file() else {}
    stored = read_shapes(folder, MEDUSA_WEIGHT_NAMES)
    if stored is None or target is None:
        return
    tensors = canonical_medusa_names(stored, config, where)
    size = truncated_size(config, tensors, target, where)
    if size is None:
        tensors.pop("token_map", None)
    else:
        tensors = {name: _cut(name, tensor, size) for name, tensor in tensors.items()}
    settings_of(tensors, target, where)


def _cut(name: str, tensor: StoredTensor, size: int) -> StoredTensor:
    """Reduces an lm_head for all tokens to the rows of a truncated vocabulary."""
    if not name.startswith("lm_heads.") or tensor.shape[0] <= size:
        return tensor
    return StoredTensor((size, *tensor.shape[1:]), tensor.dtype)


def _check_draft_model(reference: str, model_folder: Path) -> None:
    folder = draft_folder(reference)
    if folder is None:
        return
    resolve_model(reference)
    if any((folder / name).is_file() for name in WEIGHT_NAMES):
        # In the order of transformers, which loads it: a single file comes before an index, which may be left over from
        # the shards that were merged into it, and tied tensors may be absent.
        read_shapes(folder, sorted(WEIGHT_NAMES, key=lambda name: (".bin" in name, "index" in name)), is_whole=False)
    elif not any(path.suffix in (".safetensors", ".bin") for path in folder.iterdir()):
        weights_file(folder)  # raises; transformers knows other names with these suffixes
    ours, theirs = _vocabulary(model_folder), _vocabulary(folder)
    if ours is None or theirs is None or ours.spelling != theirs.spelling:
        return  # only the tokenizers themselves know the bytes of their tokens
    for token_id in sorted(ours.tokens.keys() & theirs.tokens.keys()):
        if ours.tokens[token_id] != theirs.tokens[token_id]:
            raise UnsupportedModelError(
                f"draft model {reference} has a different vocabulary than the target: token {token_id} is "
                f"{theirs.tokens[token_id]!r} in the draft and {ours.tokens[token_id]!r} in the target. "
                "Use a draft model of the target's own family."
            )


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """Vocabulary of a ``tokenizer.json``.

    Attributes:
        spelling: how tokens become text; with equal spellings, equal tokens mean the same text.
        tokens: by id, without added ones, which other files may rename.
    """

    spelling: str
    tokens: Mapping[int, str]


def _vocabulary(folder: Path) -> _Vocabulary | None:
    content = json_object(folder / _TOKENIZER_NAME)
    model = content.get("model")
    if not isinstance(model, dict):
        return None
    vocab = model.get("vocab")
    added = content.get("added_tokens") or []
    try:
        if isinstance(vocab, dict):
            tokens = {int(token_id): str(token) for token, token_id in vocab.items()}
        elif isinstance(vocab, list):  # Unigram: pairs of a token and its score
            tokens = {token_id: str(entry[0]) for token_id, entry in enumerate(vocab)}
        else:
            return None
        for entry in added:
            tokens.pop(int(entry["id"]), None)
    except (ValueError, TypeError, LookupError):
        return None  # an unreadable tokenizer is refused where it is loaded
    return _Vocabulary(json.dumps([content.get("decoder"), model.get("type")], sort_keys=True), tokens)


def _size(config: Mapping[str, Any], name: str) -> int | None:
    """``None`` when it is not stated; values of another type are refused where the whole config is read."""
    value = config.get(name)
    return value if type(value) is int else None
