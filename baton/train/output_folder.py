"""Checks the output folder: a checkpoint may replace only one that training wrote, of the same kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from baton.core.errors import BatonError, ConfigError
from baton.engine.draft.checkpoint_files import read_config, read_shapes
from baton.engine.draft.eagle.eagle_layout import EagleFormat, canonical_names, format_of
from baton.engine.draft.references import kind_of
from baton.train.card import LOG_NAME

# The speculation method of each kind of `baton train`.
_METHODS = {"eagle3": "eagle3", "medusa": "medusa", "draft": "draft_model"}
_WHAT = {
    "eagle": "an EAGLE-1/2 head",
    "eagle3": "an EAGLE-3 head",
    "medusa": "Medusa heads",
    "draft_model": "a language model",
}
# A setting that only one kind of draft has, for each kind.
_MARKS = {"eagle3": "num_ttt_steps", "medusa": "num_blocks", "draft": "num_layers"}


def check_output(folder: Path, kind: str) -> None:
    """Refuses a folder with files that do not come from an earlier training of this kind.

    Args:
        kind: kind of draft, as ``baton train`` names it.

    Raises:
        ConfigError: the folder is refused; the message says what is in it.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--out: {folder} is a file. Give a folder.")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    trained, stored = _trained_kind(folder), _stored_method(folder)
    advice = "Give an empty folder with --out, or one that does not exist yet"
    if trained is None:
        what = "" if stored is None else f", including {_WHAT[stored]}"
        raise ConfigError(
            f"--out: {folder} has files that were not written by a training run (it has no {LOG_NAME}){what}, and a "
            f"checkpoint could replace some of them. {advice}."
        )
    found, wanted = stored or _METHODS[trained], _METHODS[kind]
    if found != wanted:
        raise ConfigError(
            f"--out: {folder} holds {_WHAT[found]}, which `baton train {kind}` would replace with "
            "another kind of draft. "
            f"{advice}; or delete this one."
        )


def _trained_kind(folder: Path) -> str | None:
    """The kind of the training whose log is in the folder, or ``None``."""
    try:
        log: Any = json.loads((folder / LOG_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    settings = log.get("settings") if isinstance(log, dict) else None
    if not isinstance(settings, dict):
        return None
    return next((kind for kind, mark in _MARKS.items() if mark in settings), None)


def _stored_method(folder: Path) -> str | None:
    """The speculation method of the checkpoint in the folder; ``None`` without a readable checkpoint."""
    try:
        kind: str = kind_of(folder)
        if kind != "eagle":
            return kind
        tensors = read_shapes(folder)
        if tensors is None:
            return None
        found = format_of(read_config(folder), canonical_names(tensors), str(folder))
    except BatonError:
        return None
    return "eagle" if found is EagleFormat.EAGLE else "eagle3"
