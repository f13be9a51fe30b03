"""Resolves ``speculation.draft`` and determines the kind of the draft. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from baton.core.errors import ConfigError
from baton.core.roles import BUNDLED_DRAFTS, DRAFT_METHODS
from baton.engine.draft.checkpoint_files import CONFIG_NAME, find_checkpoint, read_config
from baton.engine.models.default_model import DEFAULT_MODEL_NAME, is_default_model
from baton.engine.models.model_source import resolve_model

AUTO = "auto"
NONE = "none"
_AUTO_DRAFT = "eagle3"
_MEDUSA_KEYS = ("medusa_num_heads", "medusa_num_layers")
_EAGLE_KEYS = ("draft_vocab_size", "speculators_model_type", "eagle_config")


def bundled_draft(name: str) -> Path:
    """The folder of one of :data:`baton.core.roles.BUNDLED_DRAFTS`."""
    return Path(str(resources.files("baton.engine.draft") / "assets" / f"{DEFAULT_MODEL_NAME}-{name}"))


def default_draft(model: str, method: str | None = None) -> Path | None:
    """The draft that ``auto`` is for the configured model; ``None`` for other models than the default one.

    Args:
        method: the method that is wanted. The draft is for this method if one of those included is.
    """
    if not is_default_model(model):
        return None
    return bundled_draft(method if method in BUNDLED_DRAFTS else _AUTO_DRAFT)


def resolve_draft(reference: str, model: str, method: str | None = None) -> str | Path | None:
    """Resolves a reference to what is loaded.

    Args:
        reference: ``auto``, ``none``, one of :data:`baton.core.roles.BUNDLED_DRAFTS`, a folder or a hub id.
        model: the target, as the configuration names it.
        method: the method that ``auto`` chooses a draft for; see :func:`default_draft`.

    Returns:
        ``None`` when there is nothing to load.

    Raises:
        ConfigError: the reference names a draft of the default model, but the model is another one.
    """
    if reference == NONE:
        return None
    if reference == AUTO:
        return default_draft(model, method)
    if reference not in BUNDLED_DRAFTS:
        return reference
    if not is_default_model(model):
        raise ConfigError(
            f"speculation.draft is {reference}, which comes with the default model ({DEFAULT_MODEL_NAME}), but the "
            f"model is {model}. Give the folder or the hub id of a draft for this model, or none."
        )
    return bundled_draft(reference)


def kind_of(reference: str | Path) -> Literal["draft_model", "eagle", "medusa"]:
    """Determines the kind by features that only one of them has; the loader validates the draft.

    Raises:
        ConfigError: there is no such draft, or its config cannot be read.
    """
    folder = draft_folder(reference)
    if folder is None:
        return "draft_model"
    config: Mapping[str, Any] = read_config(folder) if (folder / CONFIG_NAME).is_file() else {}
    has_medusa_file = any(folder.glob("medusa_lm_head.*"))
    if has_medusa_file or config.get("model_type") == "medusa" or any(key in config for key in _MEDUSA_KEYS):
        return "medusa"
    if any(key in config for key in _EAGLE_KEYS) or not (folder / "tokenizer_config.json").is_file():
        return "eagle"
    return "draft_model"


def draft_folder(reference: str | Path) -> Path | None:
    """Returns the folder of a draft, fetched first if needed.

    Returns:
        ``None`` for references that only ``resolve_model`` knows: the default model and GGUF files.

    Raises:
        ConfigError: there is no such folder, file or hub id.
        ModelUnavailableError: a model cannot be fetched or converted.
    """
    if isinstance(reference, str) and (is_default_model(reference) or reference.endswith(".gguf")):
        resolve_model(reference)
        return None
    return find_checkpoint(reference)


def check_method(method: str | None, draft: str | None, name: str | None, key: str = "speculation.method") -> None:
    """Checks that a method that needs a draft has one of its kind.

    Args:
        method: the configured method.
        draft: the method that the loaded draft is for; ``None`` without a draft.
        name: name of the draft.
        key: the key that names the method.

    Raises:
        ConfigError: the method needs a draft of another kind.
    """
    if method in DRAFT_METHODS and draft != method:
        loaded = "no draft is loaded" if draft is None else f"{name} is for the method {draft}"
        raise ConfigError(
            f"{key} is {method}, but {loaded}. Set speculation.draft to a checkpoint "
            f"of that kind (the default model comes with {', '.join(BUNDLED_DRAFTS)}), or choose another method."
        )
