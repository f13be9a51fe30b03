"""``baton model pull``: fetches or converts a model before a cluster needs it."""

from __future__ import annotations

from pathlib import Path

from baton.core.errors import ConfigError, ModelUnavailableError
from baton.engine.models.default_model import ensure_default_model, is_default_model
from baton.engine.models.model_cache import Report
from baton.engine.models.model_source import is_hub_id, resolve_model

_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
_OTHER_FORMATS = ("*/*", "consolidated*")
"""Copies of the same weights that transformers does not read, in subfolders such as original/ and onnx/."""


def pull(name: str, report: Report, *, verify: bool = False) -> Path:
    """Fetches the default model or a hub model, or converts a GGUF file, unless that has been done before.

    Args:
        verify: compare every file of the default model with its recorded SHA-256.

    Returns:
        The folder of the model.

    Raises:
        ConfigError: there is no such model, or ``verify`` is set and the model has no recorded hashes.
        ModelUnavailableError: the model cannot be fetched or converted.
    """
    if is_default_model(name):
        return ensure_default_model(report=report, verify=verify)
    if verify:
        raise ConfigError("--verify works with the default model only: there are no recorded hashes for other models.")
    source = resolve_model(name, report)
    return _from_hub(name, report) if is_hub_id(source.path) else Path(source.path)


def _from_hub(name: str, report: Report) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    report(f"looking up {name} on the hub")
    try:
        return Path(snapshot_download(name, allow_patterns=list(_FILES), ignore_patterns=list(_OTHER_FORMATS)))
    except HFValidationError as error:
        raise ConfigError(f"{name!r} is not a hub id of the form organization/name: {error}") from error
    except GatedRepoError as error:
        raise ModelUnavailableError(
            f"{name} is gated: accept its terms on the hub, then set HF_TOKEN or run `hf auth login`."
        ) from error
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"The hub has no model {name}, or it is private. Check the name; for a private model, set HF_TOKEN."
        ) from error
    except LocalEntryNotFoundError as error:
        raise ModelUnavailableError(
            f"{name} is not in the local hub cache, and the hub cannot be reached. Check the network, the proxy and"
            " HF_ENDPOINT, and that HF_HUB_OFFLINE is not set; or copy the model's folder here and give its path."
        ) from error
    except (HfHubHTTPError, OSError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelUnavailableError(f"{name} could not be fetched from the hub: {lines[0]}") from error
