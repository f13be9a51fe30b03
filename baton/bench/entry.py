"""Where the command line comes in: plain values by the names of its options, made into settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console, RenderableType

from baton.bench.command import OutputSettings, run_serve
from baton.bench.compare import run_compare
from baton.bench.settings import TargetSettings, WorkloadSettings
from baton.bench.stages import LoadSettings
from baton.bench.sweep import SweepSettings, run_sweep

S = TypeVar("S", TargetSettings, WorkloadSettings, LoadSettings, OutputSettings, SweepSettings)

_FAILED_STATUS = 1
_INTERRUPTED_STATUS = 130
"""What shells expect of a command that Ctrl-C ended."""


def serve(options: Mapping[str, Any], console: Console) -> tuple[RenderableType, int]:
    """``baton bench serve``: what to show, and the exit status. A run without any answer has failed.

    Raises:
        BatonError: see :func:`baton.bench.command.run_serve`.
    """
    outcome = run_serve(*_load_of(options), _pick(OutputSettings, options), console)
    return outcome.shown, _status(outcome.is_interrupted, has_failed=not outcome.num_answered)


def sweep(options: Mapping[str, Any], console: Console) -> tuple[RenderableType, int]:
    """``baton bench sweep``: what to show, and the exit status. A sweep that found no rate, or could not measure one,
    has failed.

    Raises:
        BatonError: see :func:`baton.bench.sweep.run_sweep`.
    """
    outcome = run_sweep(*_load_of(options), _pick(SweepSettings, options), console)
    has_failed = outcome.result.goodput is None or outcome.result.unmeasured_at is not None
    return outcome.shown, _status(outcome.is_interrupted, has_failed=has_failed)


def compare(first: Path, second: Path, tolerance: float) -> RenderableType:
    """``baton bench compare``.

    Raises:
        ConfigError: see :func:`baton.bench.compare.run_compare`.
    """
    return run_compare(first, second, tolerance)[0]


def _load_of(options: Mapping[str, Any]) -> tuple[TargetSettings, WorkloadSettings, LoadSettings]:
    """What every command that sends load needs to know."""
    return _pick(TargetSettings, options), _pick(WorkloadSettings, options), _pick(LoadSettings, options)


def _status(is_interrupted: bool, *, has_failed: bool) -> int:
    if is_interrupted:
        return _INTERRUPTED_STATUS
    return _FAILED_STATUS if has_failed else 0


def _pick(kind: type[S], options: Mapping[str, Any]) -> S:
    """Settings from the options of their names; options that were not given keep the settings' defaults."""
    names = {field.name for field in fields(kind)}
    return kind(**{name: value for name, value in options.items() if name in names})
