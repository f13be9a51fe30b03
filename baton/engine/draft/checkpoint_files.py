"""Files of draft checkpoints: their location, config, and names and shapes of their tensors. No torch here."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

from baton.core.errors import ConfigError
from baton.core.roles import BUNDLED_DRAFTS
from baton.engine.models.model_source import is_hub_id

CONFIG_NAME = "config.json"
# In order of preference; an index names the files that hold the tensors.
WEIGHT_NAMES = (
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
)
FETCH_AGAIN = "Copy or download the checkpoint again."
"""Advice for files that do not hold what they should."""
_NAMES_SHOWN = 4
# A safetensors file is the length of its header, little-endian, then the header as JSON, then the numbers.
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Shape and dtype of a tensor that was not read.

    Attributes:
        dtype: in safetensors' notation, ``BF16`` for example.
    """

    shape: tuple[int, ...]
    dtype: str

    @property
    def ndim(self) -> int:
        return len(self.shape)


def find_checkpoint(reference: str | Path) -> Path:
    """Returns the folder of a draft checkpoint; fetches a hub id first.

    Raises:
        ConfigError: it is neither a folder nor a reachable hub id.
    """
    path = Path(reference).expanduser()
    if path.is_dir():
        return path
    if not isinstance(reference, str) or not is_hub_id(reference):
        problem = "is a file, not a folder" if path.exists() else "does not exist"
        raise ConfigError(
            f"draft checkpoint: {str(reference)!r} {problem}. Expected a folder with {CONFIG_NAME} and weights, a hub "
            f"id of the form owner/name, or, for the default model, {', '.join(BUNDLED_DRAFTS)}. Correct the path; "
            "relative paths start at the current folder."
        )
    try:
        return Path(snapshot_download(reference, allow_patterns=["*.json", "*.safetensors", "*.bin", "*.pt"]))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"draft checkpoint: {reference} is not a local folder and could not be fetched from the hub: {error}\n"
            "Correct the path or the name, check the network, or give a local folder."
        ) from error


def read_config(folder: Path) -> dict[str, Any]:
    """Returns the content of ``config.json``.

    Raises:
        ConfigError: it is missing or not a JSON object.
    """
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise ConfigError(
            f"draft checkpoint: {folder} has no {CONFIG_NAME}. Give a folder that contains it and the weights."
        )
    return read_json(path)


def weights_file(folder: Path, names: Iterable[str] = WEIGHT_NAMES) -> Path:
    """The first file of ``names`` that the folder has.

    Raises:
        ConfigError: it has none.
    """
    expected = tuple(names)
    path = next((folder / name for name in expected if (folder / name).is_file()), None)
    if path is None:
        raise ConfigError(f"draft checkpoint: {folder} contains no weights. Expected one of: {', '.join(expected)}.")
    return path


def is_index(path: Path) -> bool:
    """Whether the file is an index of the files that hold the tensors."""
    return path.name.endswith(".index.json")


def shards_of(index: Path) -> dict[str, Path]:
    """The file of each tensor.

    Raises:
        ConfigError: the index cannot be read, or names a file that is not beside it.
    """
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise ConfigError(f"draft checkpoint: {index} has no weight_map from tensors to files. {FETCH_AGAIN}")
    for name in sorted(set(files.values())):
        if Path(name).name != name or not (index.parent / name).is_file():
            raise ConfigError(
                f"draft checkpoint: {index} names the file {name!r}, which is not in the same folder. {FETCH_AGAIN}"
            )
    return {tensor: index.parent / name for tensor, name in files.items()}


def check_shards(index: Path, files: Mapping[str, Path], found: Container[str]) -> None:
    """Raises :class:`ConfigError` when none of the files holds a tensor that the index lists."""
    if absent := sorted(name for name in files if name not in found):
        raise ConfigError(
            f"draft checkpoint: {index} lists tensors that its files do not contain: {shortened(absent)}. {FETCH_AGAIN}"
        )


def read_shapes(
    folder: Path, names: Iterable[str] = WEIGHT_NAMES, *, is_whole: bool = True
) -> dict[str, StoredTensor] | None:
    """Shapes and dtypes of all tensors of the checkpoint. Reads kilobytes.

    Args:
        names: names of the weight files, in order of preference.
        is_whole: requires all tensors that an index lists.

    Returns:
        ``None`` for pickled weights, whose shapes cannot be known without reading them.

    Raises:
        ConfigError: there are no weights, a shard is missing, or a file is broken or truncated.
    """
    path = weights_file(folder, names)
    files = shards_of(path) if is_index(path) else {}
    paths = sorted(set(files.values())) or [path]
    if any(file.suffix != ".safetensors" for file in paths):
        return None
    found: dict[str, StoredTensor] = {}
    for file in paths:
        found |= _read_header(file)
    if is_whole:
        check_shards(path, files, found)
    return found


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"draft checkpoint: {path} could not be read: {error}. Check its permissions.") from error
    except ValueError as error:
        raise ConfigError(
            f"draft checkpoint: {path} could not be read, because it is not JSON: {error}. Correct it "
            "if it was edited; "
            "otherwise, copy or download the checkpoint again."
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(f"draft checkpoint: {path} contains a {type(content).__name__}, expected a JSON object.")
    return content


def _read_header(path: Path) -> dict[str, StoredTensor]:
    try:
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            if not 0 < length <= _MAX_HEADER_BYTES:
                raise ValueError("it has no safetensors header")
            header: dict[str, Any] = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        end = max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
        if path.stat().st_size < _LENGTH_BYTES + length + end:
            raise ValueError("it is truncated")
        return {
            name: StoredTensor(tuple(int(size) for size in entry["shape"]), str(entry["dtype"]))
            for name, entry in header.items()
        }
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise ConfigError(
            f"draft checkpoint: the weights in {path} could not be read: {error}. {FETCH_AGAIN}"
        ) from error


def shortened(names: list[str]) -> str:
    others = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {others} more" if others > 0 else "")
