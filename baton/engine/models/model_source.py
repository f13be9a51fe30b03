"""Resolves ``model:`` to the bundled default, a hub id, a local folder or a GGUF file. No torch here."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

from baton.core.errors import ConfigError
from baton.engine.models.default_model import DEFAULT_MODEL_NAME, ensure_default_model, is_default_model
from baton.engine.models.gguf_cache import ensure_converted
from baton.engine.models.model_cache import Report


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Location of weights and tokenizer, for transformers.

    Attributes:
        path: a folder, or a hub id.
        name: the model's name for clients unless the configuration gives another.
    """

    path: str
    name: str


def resolve_model(reference: str, report: Report | None = None) -> ModelSource:
    """Locates the model; fetches the bundled default or converts a GGUF file if needed.

    Args:
        report: called with one line of progress at a time.

    Raises:
        ConfigError: ``reference`` is none of the four kinds.
        UnsupportedModelError: transformers cannot convert such a GGUF file.
        ModelUnavailableError: the default model cannot be fetched, or a GGUF file cannot be converted.
    """
    if is_default_model(reference):
        return ModelSource(str(ensure_default_model(report=report)), DEFAULT_MODEL_NAME)
    path = Path(reference).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"model: the folder {path} has no config.json. Expected a transformers model folder.")
        return ModelSource(str(path), path.resolve().name)
    if path.suffix == ".gguf":
        return ModelSource(str(ensure_converted(path, report=report)), path.stem)
    if is_hub_id(reference):
        return ModelSource(reference, reference)
    close = difflib.get_close_matches(reference, [DEFAULT_MODEL_NAME])
    hint = f" Did you mean {DEFAULT_MODEL_NAME}?" if close else ""
    raise ConfigError(
        f"model: {reference!r} is not the bundled model ({DEFAULT_MODEL_NAME}), not a local folder, not a .gguf file "
        f"and not a hub id of the form owner/name.{hint}"
    )


def is_hub_id(reference: str) -> bool:
    """True for the form ``owner/name``; the hub is not asked."""
    return reference.count("/") == 1 and not reference.startswith((".", "/", "~")) and not reference.endswith("/")
