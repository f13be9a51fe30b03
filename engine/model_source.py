"""What ``model:`` may name: the bundled default, a hub id, a local folder or a GGUF file. No torch here."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.default_model import DEFAULT_MODEL_NAME, ensure_converted, ensure_default_model
from engine.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where weights and tokenizer come from, in transformers' terms.

    Attributes:
        path: a folder, or a hub id.
        name: how clients call the model unless the config names it otherwise.
    """

    path: str
    name: str


def resolve_model(reference: str, report: Callable[[str], None] | None = None) -> ModelSource:
    """Finds the model, fetching the bundled default if need be.

    Raises:
        ConfigError: ``reference`` is none of the four kinds.
    """
    if reference in (DEFAULT_MODEL_NAME, "default"):
        return ModelSource(str(ensure_default_model(report=report)), DEFAULT_MODEL_NAME)
    path = Path(reference).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"model: the folder {path} has no config.json. Expected a transformers model folder.")
        return ModelSource(str(path), path.resolve().name)
    if path.suffix == ".gguf":
        return ModelSource(str(ensure_converted(path, report=report)), path.stem)
    if reference.count("/") == 1 and not reference.startswith((".", "/", "~")):
        return ModelSource(reference, reference)
    close = difflib.get_close_matches(reference, [DEFAULT_MODEL_NAME])
    hint = f" Did you mean {DEFAULT_MODEL_NAME}?" if close else ""
    raise ConfigError(
        f"model: {reference!r} is not the bundled model ({DEFAULT_MODEL_NAME}), not a local folder, not a .gguf file "
        f"and not a hub id of the form owner/name.{hint}"
    )
