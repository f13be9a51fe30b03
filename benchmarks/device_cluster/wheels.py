"""Wheels that a bare GPU machine lacks, carried along in a folder; large ones in pieces.

A wheel ``ray-….whl`` over the limit lies there as ``ray-….whl.part0``, ``ray-….whl.part1``, … beside
``ray-….whl.pieces``, which has their number and the SHA-256 of the whole. ``make device-wheels`` cuts it and
:func:`install` joins it.

    python -m benchmarks.device_cluster.wheels cut FOLDER
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

PIECE_BYTES = 24 * 2**20
_PIECE, _PIECES = ".part", ".pieces"
_AGAIN = "Run: make device-wheels"
_MAX_ERROR_CHARS = 600


class WheelsError(Exception):
    """A folder of wheels cannot be used."""


def cut(folder: Path, piece_bytes: int = PIECE_BYTES) -> None:
    """Replaces each wheel of more than ``piece_bytes`` by its pieces."""
    for wheel in sorted(folder.glob("*.whl")):
        if wheel.stat().st_size <= piece_bytes:
            continue
        digest, count = hashlib.sha256(), 0
        with wheel.open("rb") as whole:
            while piece := whole.read(piece_bytes):
                _piece(wheel, count).write_bytes(piece)
                digest.update(piece)
                count += 1
        whole_is = {"num_pieces": count, "sha256": digest.hexdigest()}
        wheel.with_name(wheel.name + _PIECES).write_text(json.dumps(whole_is), encoding="utf-8")
        wheel.unlink()


def join(folder: Path, target: Path) -> list[Path]:
    """Lists all wheels of a folder. Wheels in pieces are joined in ``target``.

    Raises:
        WheelsError: a piece is missing or damaged, or there are no wheels.
    """
    wheels = sorted(folder.glob("*.whl"))
    names = {path.name.rpartition(suffix)[0] for suffix in (_PIECE, _PIECES) for path in folder.glob(f"*.whl{suffix}*")}
    for name in sorted(names):
        wheels.append(target / name)
        _join_one(folder / name, wheels[-1])
    if not wheels:
        raise WheelsError(f"{folder} contains no wheels. {_AGAIN}")
    return wheels


def _join_one(wheel: Path, whole: Path) -> None:
    try:
        expected = json.loads(wheel.with_name(wheel.name + _PIECES).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise WheelsError(f"{wheel.parent} lacks {wheel.name}{_PIECES}. {_AGAIN}") from None
    digest = hashlib.sha256()
    with whole.open("wb") as file:
        for number in range(expected["num_pieces"]):
            path = _piece(wheel, number)
            if not path.exists():
                raise WheelsError(f"{wheel.parent} lacks {path.name}. {_AGAIN}")
            piece = path.read_bytes()
            digest.update(piece)
            file.write(piece)
    if digest.hexdigest() != expected["sha256"]:
        raise WheelsError(f"A piece of {wheel.name} in {wheel.parent} is damaged. {_AGAIN}")


def _piece(wheel: Path, number: int) -> Path:
    return wheel.with_name(f"{wheel.name}{_PIECE}{number}")


def install(folder: Path, target: Path) -> Path:
    """Installs the wheels of ``folder`` without a package index; returns the path to import them from.

    A later call with the same unchanged wheels reuses what an earlier call installed in ``target``.

    Raises:
        WheelsError: see :func:`join`, or pip refused a wheel.
    """
    if not folder.is_dir():
        raise WheelsError(f"{folder} is not a folder. {_AGAIN}")
    packages = target / f"packages-{_fingerprint(folder.iterdir())}"
    if packages.exists():
        return packages
    target.mkdir(parents=True, exist_ok=True)
    options = ["--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--disable-pip-version-check", "-q"]
    with TemporaryDirectory(dir=target) as scratch:
        wheels = [str(wheel) for wheel in join(folder, Path(scratch))]
        unfinished = Path(scratch) / "packages"
        command = [sys.executable, "-m", "pip", "install", *options, "--target", str(unfinished), *wheels]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise WheelsError(f"pip cannot install the wheels in {folder}: {done.stderr.strip()[-_MAX_ERROR_CHARS:]}")
        unfinished.rename(packages)
    return packages


def _fingerprint(files: Iterable[Path]) -> str:
    """A hash of the files' names, sizes and times, and of the Python version."""
    stats = sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files)
    return hashlib.sha256(repr((sys.version, stats)).encode()).hexdigest()[:16]


def main() -> None:
    """Runs ``cut FOLDER``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["cut"])
    parser.add_argument("folder", type=Path)
    cut(parser.parse_args().folder)


if __name__ == "__main__":
    main()
