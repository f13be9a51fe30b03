"""Manifests of model folders that baton writes: names, sizes and hashes of the files."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import BinaryIO

MANIFEST_NAME = "baton-manifest.json"
_READ_BYTES = 4 << 20


def sha256_of(file: Path) -> str:
    """Hex digest of a file's content, read piece by piece."""
    with file.open("rb") as stream:
        return copy_and_hash(stream, None)


def copy_and_hash(source: BinaryIO, target: BinaryIO | None) -> str:
    """Reads ``source`` to its end, writes it to ``target`` if given, and returns its SHA-256 in hex."""
    digest = hashlib.sha256()
    while piece := source.read(_READ_BYTES):
        digest.update(piece)
        if target is not None:
            target.write(piece)
    return digest.hexdigest()


def write_manifest(folder: Path, source: str) -> None:
    """Hashes every file of the folder, flushes all of them to disk, and writes the manifest last.

    Args:
        source: what the folder was made from and how; a folder with another source is stale.
    """
    files = {}
    for file in sorted(path for path in folder.iterdir() if path.is_file() and path.name != MANIFEST_NAME):
        files[file.name] = {"bytes": file.stat().st_size, "sha256": sha256_of(file)}
        _flush_to_disk(file)
    manifest = folder / MANIFEST_NAME
    manifest.write_text(json.dumps({"source": source, "files": files}, indent=2) + "\n", encoding="utf-8")
    _flush_to_disk(manifest)


def find_problem(folder: Path, source: str, *, hashes: bool = False) -> str | None:
    """Describes what is wrong with the folder; ``None`` when it is complete.

    Args:
        hashes: also compare every file's content with its hash; otherwise only names and sizes, in under a millisecond.
    """
    if not folder.is_dir():
        return "it does not exist"
    try:
        manifest = json.loads((folder / MANIFEST_NAME).read_text(encoding="utf-8"))
        recorded_source, files = manifest["source"], manifest["files"]
        expected = {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"its {MANIFEST_NAME} is missing or unreadable"
    if recorded_source != source:
        return "it was converted from a different source or by a different version"
    for name, (num_bytes, digest) in expected.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != num_bytes:
            return f"{name} has {file.stat().st_size} bytes instead of {num_bytes}"
        if hashes and sha256_of(file) != digest:
            return f"{name} does not match its recorded SHA-256"
    return None


def _flush_to_disk(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
