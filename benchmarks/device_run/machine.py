"""The description of the machine at the beginning of a report."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import psutil
import torch

from benchmarks.device_run.part import Part, Row, Run, Setting

_TIMEOUT_S = 10.0
_PACKAGES = ("torch", "triton", "transformers", "numpy", "pydantic")
_TOOLS = ("nvcc", "compute-sanitizer", "ncu")
_ROOT = Path(__file__).resolve().parents[2]


class MachinePart(Part):
    """The first part of every run: it also proves that CUDA starts in a process of this run."""

    def load(self) -> Run:
        """The function :func:`run` of this module."""
        return run


MACHINE = MachinePart("machine", 60, "machine", "")


def run(setting: Setting) -> Iterator[Row]:
    """Yields one row, whose ``name`` is the card.

    Raises:
        RuntimeError: CUDA was requested and is not available.
    """
    if setting.device.type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(
            "torch finds no GPU on this machine. Add --device cpu --shape tiny to try the parts on the CPU."
        )
    compiler = shutil.which("gcc") or shutil.which("cc")
    row: dict[str, object] = {"name": setting.device_name, "python": platform.python_version()}
    row |= {name: _version(name) for name in _PACKAGES}
    row |= {"commit": _output_of("git", "-C", str(_ROOT), "describe", "--always", "--dirty"), "os": platform.release()}
    row["compiler"] = _first_line(_output_of(compiler, "--version")) if compiler else "none"
    row |= {"tools": " ".join(name for name in _TOOLS if shutil.which(name)) or "none"}
    row |= {"cpus": len(os.sched_getaffinity(0)), "cpu": _cpu_name()}
    row["memory_gib"] = round(psutil.virtual_memory().total / 2**30, 1)
    if setting.device.type == "cuda":
        card = torch.cuda.get_device_properties(setting.device)
        row |= {"cuda": torch.version.cuda, "capability": f"{card.major}.{card.minor}"}
        row |= {"processors": card.multi_processor_count, "card_gib": round(card.total_memory / 2**30, 1)}
        fields = "driver_version,clocks.sm,clocks.mem,temperature.gpu,power.limit"
        row["nvidia_smi"] = _output_of("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader") or "none"
    yield row


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def _output_of(*command: str) -> str:
    """The standard output of a command; empty if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
