"""Converts GGUF files once into folders in the cache. No torch at import."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from pathlib import Path

from baton.core.errors import ConfigError, ModelUnavailableError, UnsupportedModelError
from baton.engine.models.model_cache import Report, cache_dir, ensure_folder, last_line, run_logged

REFUSAL = "error: "
"""Prefix of the line in which ``baton.engine.models.gguf_convert`` says why it refuses a file."""

_MAGIC = b"GGUF"
_SAMPLE_BYTES = 1 << 20
_CONVERSION_VERSION = 1
"""Increase it when the conversion changes its result; folders made before are then made again."""


def ensure_converted(path: Path, report: Report | None = None) -> Path:
    """Returns a transformers folder with the content of a GGUF file; converts the file first if needed.

    Raises:
        ConfigError: there is no such file, or it is not a GGUF file.
        UnsupportedModelError: transformers cannot convert such a model.
        ModelUnavailableError: the conversion failed, or the cache cannot be written.
    """
    say: Report = report or (lambda line: None)
    fingerprint = _fingerprint(path)
    folder = cache_dir() / "models" / f"gguf-{path.stem}-{fingerprint[:12]}"

    def make(work: Path) -> Path:
        say(f"converting {path.name} ({path.stat().st_size / 1e9:.1f} GB); this happens once")
        return convert(path.absolute(), work)

    return ensure_folder(folder, f"gguf {fingerprint} conversion:{_CONVERSION_VERSION}", make, report)


def convert(gguf_file: Path, work: Path) -> Path:
    """Converts into a folder inside ``work``, in a separate process that keeps torch and the weights out of this one.

    Raises:
        UnsupportedModelError: transformers cannot convert such a model.
        ModelUnavailableError: the conversion failed.
    """
    folder, log = work / "converted", work / "convert.log"
    source_root = str(Path(__file__).resolve().parents[3])
    python_path = os.pathsep.join(filter(None, (source_root, os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "baton.engine.models.gguf_convert", str(gguf_file), str(folder)]
    returncode = run_logged(command, log, {"PYTHONPATH": python_path})
    if returncode == 0:
        return folder
    reason = last_line(log)
    if reason.startswith(REFUSAL):
        raise UnsupportedModelError(reason.removeprefix(REFUSAL))
    if returncode == -signal.SIGKILL:
        reason = "the system killed it, most likely because memory ran out: about 8 bytes per weight are needed"
    raise ModelUnavailableError(
        f"Converting {gguf_file.name} failed: {reason.rstrip('.')}. The file may be damaged; otherwise, install the"
        " versions of torch, transformers and gguf that constraints.txt has."
    )


def _fingerprint(path: Path) -> str:
    """Identifies a file without reading all of it: size, time of change, first and last MiB.

    Raises:
        ConfigError: there is no such file, or it is not a GGUF file.
    """
    try:
        status = path.stat()
        with path.open("rb") as stream:
            head = stream.read(_SAMPLE_BYTES)
            stream.seek(max(0, status.st_size - _SAMPLE_BYTES))
            tail = stream.read(_SAMPLE_BYTES)
    except OSError as error:
        raise ConfigError(f"model: cannot read the GGUF file {path}: {error.strerror}.") from error
    if not head.startswith(_MAGIC):
        raise ConfigError(f"model: {path} is not a GGUF file: it does not begin with the letters GGUF.")
    digest = hashlib.sha256(f"{status.st_size} {status.st_mtime_ns} ".encode())
    digest.update(head)
    digest.update(tail)
    return digest.hexdigest()
