"""``baton bench``: reads lists from options and starts the benchmarks, which are named by string as roles are.

They load models into this process, which the rest of the command line never does.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from baton.core.errors import ConfigError
from baton.process.worker_environment import become_like_a_worker
from cluster.config.config import load_config

REPORT_COLUMNS = 140
"""Tables of figures are never cut: narrower terminals break their lines."""
_SPECULATION = "benchmarks.speculation:run"
_LOSSLESSNESS = "benchmarks.losslessness:run"
_EXTRA_LIBRARIES = ("aiohttp", "matplotlib", "plotly")


def bench_speculation(
    config: Path | None, overrides: Mapping[str, Any], report: Callable[[str], None], **settings: Any
) -> RenderableType:
    """See :func:`benchmarks.speculation.run`.

    Args:
        config: YAML file; None for the defaults.
        overrides: dotted key → value, laid over it.

    Raises:
        BatonError: something that was asked for is not known or cannot run.
    """
    become_like_a_worker()
    result: RenderableType = load_benchmark(_SPECULATION)(load_config(config, overrides), report, **settings)
    return result


def bench_lossless(
    config: Path | None, overrides: Mapping[str, Any], report: Callable[[str], None], *, draws: int, seeds: int
) -> tuple[RenderableType, bool]:
    """See :func:`benchmarks.losslessness.run`; ``config`` and ``overrides`` as above.

    Raises:
        BatonError: model or draft cannot be loaded.
    """
    become_like_a_worker()
    result: tuple[RenderableType, bool] = load_benchmark(_LOSSLESSNESS)(
        load_config(config, overrides), report, draws, seeds
    )
    return result


def names(text: str) -> tuple[str, ...]:
    """``"a, b"`` → ``("a", "b")``, each once; nothing → none."""
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def names_if_given(option: str, text: str | None) -> tuple[str, ...]:
    """As :func:`names`; none where the option was left out. :class:`ConfigError` for one that was given without any."""
    found = names(text or "")
    if text is not None and not found:
        raise ConfigError(
            f"{option} is empty. Give names with commas between, or leave the option out for all of them."
        )
    return found


def integers(option: str, text: str) -> tuple[int, ...]:
    """``"1,4"`` → ``(1, 4)``. Raises :class:`ConfigError`, which names ``option``, for anything else."""
    try:
        return tuple(int(part) for part in names(text))
    except ValueError as error:
        raise ConfigError(f"{option} takes whole numbers with commas between, such as 1,4,16; got {text!r}.") from error


def numbers(option: str, text: str) -> tuple[float, ...]:
    """``"0,0.8"`` → ``(0.0, 0.8)``. Raises :class:`ConfigError`, which names ``option``, for anything else."""
    try:
        found = tuple(float(part) for part in names(text))
    except ValueError:
        found = (math.nan,)
    if not all(map(math.isfinite, found)):
        raise ConfigError(f"{option} takes numbers with commas between, such as 0,0.8; got {text!r}.")
    return found


def load_benchmark(path: str) -> Callable[..., Any]:
    """The function that ``module:name`` names.

    Raises:
        ConfigError: a library of the extra ``bench`` is not installed.
    """
    module_name, _, function_name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name not in _EXTRA_LIBRARIES:
            raise
        raise ConfigError(
            f"{error.name} is missing. Install it with: pip install -e '.[bench]' (in baton's folder)"
        ) from error
    function: Callable[..., Any] = getattr(module, function_name)
    return function
