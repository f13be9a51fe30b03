"""What a machine is like, as far as a cluster depends on it. Collected without importing torch."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from baton.core.errors import BatonError
from baton.engine.models.default_model import default_model_folder, is_default_model
from baton.engine.models.model_source import is_hub_id

_CUDA = re.compile(r"^cuda\b.*=\s*'([\d.]+)'", re.MULTILINE)
_SHARED_MEMORY = "/dev/shm"
_RDMA_DEVICES = Path("/sys/class/infiniband")
_COMMAND_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Facts of one machine.

    Attributes:
        cuda: version of CUDA that torch was built for; empty if for none, or without torch.
        driver: version of the NVIDIA driver; empty without one.
        gpus: their names.
        shm_bytes, shm_free_bytes: size and free part of the shared memory.
        max_files: limit of open files of a process.
        max_locked_bytes: limit of memory that a process may lock, which RDMA does; -1 if there is none.
        rdma: names of the devices for RDMA (InfiniBand, RoCE, EFA).
        has_model: whether the model's files are there; ``None`` if that cannot be known without loading it.
    """

    hostname: str
    python: str
    ray: str
    baton: str
    torch: str
    cuda: str
    driver: str
    gpus: tuple[str, ...]
    shm_bytes: int
    shm_free_bytes: int
    max_files: int
    max_locked_bytes: int
    rdma: tuple[str, ...]
    has_model: bool | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> NodeFacts:
        return cls(**{**values, "gpus": tuple(values["gpus"]), "rdma": tuple(values["rdma"])})


def gather_facts(model: str) -> NodeFacts:
    """The facts of this machine.

    Args:
        model: the configuration's ``model``.
    """
    shared = os.statvfs(_SHARED_MEMORY) if Path(_SHARED_MEMORY).is_dir() else None
    driver, gpus = _nvidia()
    return NodeFacts(
        hostname=socket.gethostname(),
        python=platform.python_version(),
        ray=_version("ray"),
        baton=_version("baton-serve"),
        torch=_version("torch"),
        cuda=_cuda_of_torch(),
        driver=driver,
        gpus=gpus,
        shm_bytes=shared.f_blocks * shared.f_frsize if shared else 0,
        shm_free_bytes=shared.f_bavail * shared.f_frsize if shared else 0,
        max_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        max_locked_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        rdma=tuple(sorted(path.name for path in _RDMA_DEVICES.iterdir())) if _RDMA_DEVICES.is_dir() else (),
        has_model=_has_model(model),
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _cuda_of_torch() -> str:
    found = importlib.util.find_spec("torch")
    for folder in found.submodule_search_locations or () if found else ():
        with suppress(OSError):
            match = _CUDA.search((Path(folder) / "version.py").read_text(encoding="utf-8"))
            return match[1] if match else ""
    return ""


def _nvidia() -> tuple[str, tuple[str, ...]]:
    """The driver's version and the names of the GPUs."""
    if shutil.which("nvidia-smi") is None:
        return "", ()
    command = ["nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return "", ()
    rows = [line.split(", ", 1) for line in done.stdout.splitlines() if ", " in line]
    return (rows[0][0], tuple(name for _, name in rows)) if rows else ("", ())


def _has_model(model: str) -> bool | None:
    try:
        if is_default_model(model):
            return default_model_folder().is_dir()
        if Path(model).expanduser().exists():
            return True
        if is_hub_id(model):
            from huggingface_hub import try_to_load_from_cache  # takes a second

            return isinstance(try_to_load_from_cache(model, "config.json"), str)
    except (BatonError, OSError):
        return None
    return False
