"""Checks tiny models in float32: equal tokens with graphs, overlap and every speculation method: ``--only models``.

On CUDA several processes share the models, so that a capture that breaks its process costs one row.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.device_run.architecture_checks import ARCHITECTURES, check_architecture
from benchmarks.device_run.capture_checks import check_capture
from benchmarks.device_run.children import Children, processes_per_gpu, run_here
from benchmarks.device_run.error_checks import ERRORS
from benchmarks.device_run.part import Row, Setting
from benchmarks.device_run.speculation_checks import METHODS, check_method
from tests.tiny_models import CONFIGS

_SPECULATION, _CAPTURE = "speculation by ", "graphs of "
_ON_CPU = ("llama", "gemma2", "deepseek_v2")


def run(setting: Setting) -> Iterator[Row]:
    """Yields a row for each comparison of tokens."""
    wanted = names(setting)
    if setting.device.type == "cuda":
        yield from Children(__name__, processes_per_gpu()).run(wanted, setting)
        return
    yield from run_here(__name__, wanted, setting)
    yield {"name": "graphs", "not_run": "needs CUDA"}


def names(setting: Setting) -> list[str]:
    """The names of all checks. Only CUDA has graphs and device errors; a tiny run on the CPU has few architectures."""
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
