"""Draft checkpoints as files: where they lie, their config, their tensors, and what tells two drafts apart."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file

from engine.errors import ConfigError, UnsupportedModelError
from engine.model_source import is_hub_id

CONFIG_NAME = "config.json"
# In order of preference; an index names the files that hold the tensors.
WEIGHT_NAMES = (
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
)
_NAMES_SHOWN = 4


def find_checkpoint(reference: str | Path) -> Path:
    """The folder of a draft checkpoint; a hub id is fetched first.

    Raises:
        ConfigError: it is neither a folder nor a hub id that can be reached.
    """
    path = Path(reference).expanduser()
    if path.is_dir():
        return path
    if not isinstance(reference, str) or not is_hub_id(reference):
        raise ConfigError(
            f"draft checkpoint: {str(reference)!r} is not a folder. Expected a folder with {CONFIG_NAME} and weights, "
            "or a hub id of the form owner/name."
        )
    try:
        return Path(snapshot_download(reference, allow_patterns=["*.json", "*.safetensors", "*.bin", "*.pt"]))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"draft checkpoint: {reference} is no local folder and could not be fetched from the hub: {error}"
        ) from error


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json`` as it is written.

    Raises:
        ConfigError: it is missing or no JSON object.
    """
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise ConfigError(f"draft checkpoint: {folder} has no {CONFIG_NAME}.")
    return _read_json(path)


def read_tensors(folder: Path, names: Iterable[str] = WEIGHT_NAMES) -> dict[str, torch.Tensor]:
    """All tensors of the checkpoint, on the CPU, from the first of ``names`` that the folder has.

    Pickled files are read without running code from them.

    Raises:
        ConfigError: no weights, a file that cannot be read, a missing shard, or numbers that are not finite.
    """
    expected = tuple(names)
    path = next((folder / name for name in expected if (folder / name).is_file()), None)
    if path is None:
        raise ConfigError(f"draft checkpoint: {folder} holds no weights. Expected one of: {', '.join(expected)}.")
    tensors = _read_shards(path) if path.name.endswith(".index.json") else _read_file(path)
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise ConfigError(f"draft checkpoint: {name} in {path} has values that are not finite numbers.")
    return tensors


def check_tensors(
    expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor], where: str, kind: str
) -> None:
    """Compares names and shapes, and tells numbers from ids.

    Args:
        expected: what the network has; values do not matter, and may lie on the meta device.
        where: what the message calls the checkpoint.
        kind: what it was read as, ``"an EAGLE-3 head"`` for example.

    Raises:
        UnsupportedModelError: it lacks tensors, has others, or has them in another shape; the message names them.
    """
    problems = []
    if missing := sorted(expected.keys() - found.keys()):
        problems.append(f"missing: {_shortened(missing)}")
    if unexpected := sorted(found.keys() - expected.keys()):
        problems.append(f"unexpected: {_shortened(unexpected)}")
    common = sorted(expected.keys() & found.keys())
    if shapes := [
        f"{name} is {list(found[name].shape)} instead of {list(expected[name].shape)}"
        for name in common
        if found[name].shape != expected[name].shape
    ]:
        problems.append(f"other shapes: {_shortened(shapes)}")
    if kinds := [
        f"{name} is {found[name].dtype}"
        for name in common
        if found[name].is_floating_point() != expected[name].is_floating_point()
    ]:
        problems.append(f"other kinds of numbers: {_shortened(kinds)}")
    if problems:
        raise UnsupportedModelError(f"draft checkpoint {where}, read as {kind}: {'; '.join(problems)}.")


def fingerprint(settings: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> str:
    """Hex digest over settings, and over every tensor's name, dtype, shape and bytes.

    Two workers whose drafts have the same one compute the same draft KV.
    """
    digest = hashlib.blake2b(json.dumps(settings, sort_keys=True, default=str).encode(), digest_size=16)
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"draft checkpoint: {path} could not be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"draft checkpoint: {path} holds a {type(content).__name__}, expected a JSON object.")
    return content


def _read_shards(index: Path) -> dict[str, torch.Tensor]:
    files = _read_json(index).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise ConfigError(f"draft checkpoint: {index} has no weight_map from tensors to files.")
    tensors: dict[str, torch.Tensor] = {}
    for name in sorted(set(files.values())):
        if Path(name).name != name or not (index.parent / name).is_file():
            raise ConfigError(f"draft checkpoint: {index} names the file {name!r}, which is not beside it.")
        tensors.update(_read_file(index.parent / name))
    if absent := sorted(files.keys() - tensors.keys()):
        raise ConfigError(f"draft checkpoint: {index} promises tensors that its files lack: {_shortened(absent)}.")
    return tensors


def _read_file(path: Path) -> dict[str, torch.Tensor]:
    try:
        content: Any = (
            load_file(path)
            if path.suffix == ".safetensors"
            else torch.load(path, map_location="cpu", weights_only=True)
        )
    except (OSError, ValueError, RuntimeError, LookupError, EOFError, pickle.UnpicklingError, SafetensorError) as error:
        raise ConfigError(f"draft checkpoint: the weights in {path} could not be read: {error}") from error
    if not isinstance(content, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in content.values()):
        raise ConfigError(f"draft checkpoint: {path} holds something else than named tensors.")
    return content


def _shortened(names: list[str]) -> str:
    others = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {others} more" if others > 0 else "")
