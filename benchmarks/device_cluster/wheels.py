"""Wheels that a bare GPU machine lacks, carried along in a folder; large ones in pieces.

A wheel ``ray-….whl`` over the limit lies there as ``ray-….whl.part0``, ``ray-….whl.part1``, … ``make device-wheels``
cuts it and :func:`install` joins it.

    python -m benchmarks.device_cluster.wheels cut FOLDER
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

PIECE_BYTES = 48 * 2**20
_PIECE = ".part"


def cut(folder: Path, piece_bytes: int = PIECE_BYTES) -> None:
    """Replaces each wheel of more than ``piece_bytes`` by its pieces."""
    for wheel in sorted(folder.glob("*.whl")):
        if wheel.stat().st_size <= piece_bytes:
            continue
        with wheel.open("rb") as whole:
            for number, piece in enumerate(iter(lambda: whole.read(piece_bytes), b"")):
                wheel.with_name(f"{wheel.name}{_PIECE}{number}").write_bytes(piece)
        wheel.unlink()


def join(folder: Path, target: Path) -> list[Path]:
    """All wheels of a folder; those in pieces are put together in ``target``.

    Raises:
        FileNotFoundError: a piece is missing, or there is no wheel at all.
    """
    wheels = sorted(folder.glob("*.whl"))
    pieces: dict[str, dict[int, Path]] = {}
    for path in folder.glob(f"*.whl{_PIECE}*"):
        name, _, number = path.name.rpartition(_PIECE)
        pieces.setdefault(name, {})[int(number)] = path
    for name, numbered in sorted(pieces.items()):
        if missing := set(range(max(numbered) + 1)) - set(numbered):
            raise FileNotFoundError(f"{folder} lacks {name}{_PIECE}{min(missing)}. Run: make device-wheels")
        whole = target / name
        with whole.open("wb") as file:
            for _, path in sorted(numbered.items()):
                file.write(path.read_bytes())
        wheels.append(whole)
    if not wheels:
        raise FileNotFoundError(f"{folder} holds no wheels. Run: make device-wheels")
    return wheels


def install(folder: Path, target: Path) -> Path:
    """Installs the wheels of ``folder`` without a package index; returns the path to import them from.

    Raises:
        FileNotFoundError: see :func:`join`.
        subprocess.CalledProcessError: pip refused a wheel, for which its output says why.
    """
    packages = target / "packages"
    if packages.exists():
        return packages
    target.mkdir(parents=True, exist_ok=True)
    wheels = [str(wheel) for wheel in join(folder, target)]
    options = ["--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--disable-pip-version-check", "-q"]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, "--target", str(packages), *wheels], check=True)
    return packages


def main() -> None:
    """``cut FOLDER``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["cut"])
    parser.add_argument("folder", type=Path)
    cut(parser.parse_args().folder)


if __name__ == "__main__":
    main()
