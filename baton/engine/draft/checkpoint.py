"""Tensors of draft checkpoints: reads, writes, compares and fingerprints them."""

from __future__ import annotations

import hashlib
import json
import pickle
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from baton.core.errors import ConfigError, UnsupportedModelError
from baton.core.files import writing
from baton.engine.draft.checkpoint_files import (
    FETCH_AGAIN,
    WEIGHT_NAMES,
    check_shards,
    is_index,
    shards_of,
    shortened,
    weights_file,
)
from baton.engine.draft.tensor_names import FileNames


def read_tensors(folder: Path, names: Iterable[str] = WEIGHT_NAMES) -> dict[str, torch.Tensor]:
    """Reads all tensors of the checkpoint to the CPU, from the first file of ``names`` that the folder has.

    Pickled files are read without running code from them.

    Raises:
        ConfigError: there are no weights, a file cannot be read, a shard is missing, or a value is not finite.
    """
    path = weights_file(folder, names)
    tensors = _read_shards(path) if is_index(path) else _read_file(path)
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise ConfigError(f"draft checkpoint: {name} in {path} has values that are not finite.")
    return tensors


def write_tensors(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Writes a safetensors file with the permissions of any new file.

    Args:
        tensors: contiguous, on the CPU.

    Raises:
        StorageError: it cannot be written.
    """
    with writing(path, also=(SafetensorError,)):
        save_file(tensors, path, metadata=metadata)
        let_others_read(path)


def let_others_read(path: Path) -> None:
    """Gives a file the mode of any new one; safetensors makes its own readable only for the owner."""
    ordinary = path.with_name(f".{path.name}.mode")  # the umask itself can only be read by changing it
    ordinary.touch()
    try:
        path.chmod(stat.S_IMODE(ordinary.stat().st_mode))
    finally:
        ordinary.unlink()


def check_tensors(
    expected: Mapping[str, torch.Tensor],
    found: Mapping[str, torch.Tensor],
    where: str,
    kind: str,
    in_file: FileNames,
) -> None:
    """Compares names and shapes, and floating-point with integer dtypes.

    Args:
        expected: the network's tensors; their values are ignored, and they may be on the meta device.
        where: name of the checkpoint in messages.
        kind: what it was read as, ``"an EAGLE-3 head"`` for example.
        in_file: maps names for messages.

    Raises:
        UnsupportedModelError: it lacks tensors, has others, or has other shapes or dtypes; the message names them.
    """
    problems = []
    if missing := sorted(expected.keys() - found.keys()):
        problems.append(f"missing: {shortened([in_file(name) for name in missing])}")
    if unexpected := sorted(found.keys() - expected.keys()):
        problems.append(f"unexpected: {shortened([in_file(name) for name in unexpected])}")
    common = sorted(expected.keys() & found.keys())
    if shapes := [
        f"{in_file(name)} is {list(found[name].shape)} instead of {list(expected[name].shape)}"
        for name in common
        if found[name].shape != expected[name].shape
    ]:
        problems.append(f"wrong shapes: {shortened(shapes)}")
    if kinds := [
        f"{in_file(name)} is {found[name].dtype}"
        for name in common
        if found[name].is_floating_point() != expected[name].is_floating_point()
    ]:
        problems.append(f"wrong dtypes: {shortened(kinds)}")
    if problems:
        raise UnsupportedModelError(f"draft checkpoint {where}, read as {kind}: {'; '.join(problems)}.")


def fingerprint(settings: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> str:
    """Hex digest over settings, and over every tensor's name, dtype, shape and bytes.

    Two workers whose drafts have equal fingerprints compute the same draft KV.
    """
    digest = hashlib.blake2b(json.dumps(settings, sort_keys=True, default=str).encode(), digest_size=16)
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _read_shards(index: Path) -> dict[str, torch.Tensor]:
    files = shards_of(index)
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(set(files.values())):
        tensors.update(_read_file(path))
    check_shards(index, files, tensors)
    return tensors


def _read_file(path: Path) -> dict[str, torch.Tensor]:
    try:
        content: Any = (
            load_file(path)
            if path.suffix == ".safetensors"
            else torch.load(path, map_location="cpu", weights_only=True)
        )
    except (OSError, ValueError, RuntimeError, LookupError, EOFError, pickle.UnpicklingError, SafetensorError) as error:
        raise ConfigError(
            f"draft checkpoint: the weights in {path} could not be read: {error}. {FETCH_AGAIN}"
        ) from error
    if not isinstance(content, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in content.values()):
        raise ConfigError(f"draft checkpoint: {path} does not contain named tensors.")
    return content
