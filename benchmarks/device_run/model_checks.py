"""Checks of whole tiny models, by name: architectures, speculation, recorded graphs, and errors of the device."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.device_run.architecture_checks import ARCHITECTURES, check_architecture
from benchmarks.device_run.borrowed import CONFIGS
from benchmarks.device_run.capture_checks import check_capture
from benchmarks.device_run.error_checks import ERRORS
from benchmarks.device_run.part import Row, Setting
from benchmarks.device_run.speculation_checks import METHODS, check_method

_SPECULATION, _CAPTURE = "speculation by ", "graphs of "
_ON_CPU = ("llama", "gemma2", "deepseek_v2")


def names(setting: Setting) -> list[str]:
    """Graphs and errors of the device are there on CUDA only; a tiny run on the CPU has a few architectures."""
    architectures = _ON_CPU if setting.device.type == "cpu" and setting.is_tiny else ARCHITECTURES
    names = [*architectures, *(_SPECULATION + name for name in METHODS)]
    return [*names, *ERRORS, *(_CAPTURE + name for name in CONFIGS)] if setting.device.type == "cuda" else names


def check(name: str, setting: Setting) -> Iterator[Row]:
    """Yields the rows of one check."""
    if name.startswith(_SPECULATION):
        yield from check_method(name.removeprefix(_SPECULATION), setting.device)
    elif name.startswith(_CAPTURE):
        yield from check_capture(name.removeprefix(_CAPTURE), setting.device)
    elif name in ERRORS:
        yield from ERRORS[name](setting.device)
    else:
        yield from check_architecture(name, setting.device)
