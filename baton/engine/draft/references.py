"""What ``speculation.draft`` may name, and which kind of draft that is. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from baton.core.errors import ConfigError
from baton.core.roles import DRAFT_METHODS
from baton.engine.draft.checkpoint_files import CONFIG_NAME, find_checkpoint, read_config
from baton.engine.models.default_model import is_default_model
from baton.engine.models.model_source import resolve_model

AUTO = "auto"
NONE = "none"
_DEFAULT_HEAD = "smollm2-135m-instruct-eagle3"
_MEDUSA_KEYS = ("medusa_num_heads", "medusa_num_layers")
_EAGLE_KEYS = ("draft_vocab_size", "speculators_model_type", "eagle_config")


def default_draft(model: str) -> Path | None:
    """The draft that comes with baton for the model that a configuration names; None for others."""
    if not is_default_model(model):
        return None
    folder = Path(str(resources.files("baton.engine.draft") / "assets" / _DEFAULT_HEAD))
    return folder if (folder / CONFIG_NAME).is_file() else None


def resolve_draft(reference: str, model: str) -> str | Path | None:
    """What to load for a reference.

    Args:
        reference: ``auto``, ``none``, a folder or a hub id.
        model: the target, as the configuration names it.

    Returns:
        None when there is nothing to load.
    """
    if reference == NONE:
        return None
    return default_draft(model) if reference == AUTO else reference


def kind_of(reference: str | Path) -> Literal["draft_model", "eagle", "medusa"]:
    """Tells the kinds apart by what only one of them has; whether it is sound, its loader finds out.

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
    """The folder of a draft, fetched first if need be.

    Returns:
        None for what only ``resolve_model`` knows: the default model and GGUF files.

    Raises:
        ConfigError: there is no such folder, file or hub id.
        ModelUnavailableError: a model cannot be fetched or converted.
    """
    if isinstance(reference, str) and (is_default_model(reference) or reference.endswith(".gguf")):
        resolve_model(reference)
        return None
    return find_checkpoint(reference)


def check_method(method: str, draft: str | None, name: str | None) -> None:
    """A method that needs a draft has one of its kind.

    Args:
        method: of requests that do not choose.
        draft: the method that the loaded draft is for; None without a draft.
        name: what the draft is called.

    Raises:
        ConfigError: it has none.
    """
    if method in DRAFT_METHODS and draft != method:
        loaded = "no draft is loaded" if draft is None else f"{name} is for the method {draft}"
        raise ConfigError(
            f"speculation.method is {method}, but {loaded}. Set speculation.draft to a checkpoint "
            "of that kind (auto: the EAGLE-3 head that comes with the default model), or choose another method."
        )
