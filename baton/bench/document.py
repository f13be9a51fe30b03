"""The JSON report of a run: all settings, all figures and the environment."""

from __future__ import annotations

import json
import math
import os
import platform
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

from baton.bench.checklist import checklist
from baton.bench.sample import Slo
from baton.bench.settings import TargetSettings, WorkloadSettings
from baton.bench.stage_result import StageResult
from baton.bench.stages import LoadSettings
from baton.core.errors import ConfigError
from baton.core.files import replace_file
from baton.core.version import package_version

SERVE_FORMAT = "baton-bench-serve"
SWEEP_FORMAT = "baton-bench-sweep"
FORMAT_VERSION = 2
_DIGITS = 6
_SECRET = "api_key"
_PACKAGES = ("aiohttp", "numpy", "uvloop")


def make_header(
    file_format: str,
    target: TargetSettings,
    workload: WorkloadSettings,
    more_settings: Mapping[str, Any],
    target_description: Mapping[str, Any],
) -> dict[str, Any]:
    """The common header of all reports, without the API key."""
    target_values = {name: value for name, value in asdict(target).items() if name != _SECRET}
    return {
        "format": file_format,
        "version": FORMAT_VERSION,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": environment(),
        "settings": {"target": target_values, "workload": asdict(workload), **more_settings},
        "target": dict(target_description),
    }


def serve_document(
    target: TargetSettings,
    workload: WorkloadSettings,
    load: LoadSettings,
    slo: Slo | None,
    target_description: Mapping[str, Any],
    notes: Sequence[str],
    stages: Sequence[StageResult],
    *,
    with_samples: bool,
) -> dict[str, Any]:
    """The report of ``baton bench serve``, which :func:`write_json` converts to JSON."""
    settings = {"load": asdict(load), "slo": None if slo is None else slo.to_dict()}
    header = make_header(SERVE_FORMAT, target, workload, settings, target_description)
    return {
        **header,
        "notes": list(notes),
        "checklist": [check.to_dict() for check in checklist(stages)],
        "stages": [stage.to_dict(with_samples=with_samples) for stage in stages],
    }


def environment() -> dict[str, Any]:
    """The environment of the client."""
    return {
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "packages": {"baton-serve": package_version(), **{name: metadata.version(name) for name in _PACKAGES}},
    }


def check_writable(option: str, file: Path) -> None:
    """Checks before a measurement that ``file`` can be written, and creates its folder.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        if file.is_dir():
            raise IsADirectoryError(f"{file} is a folder")
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=file.parent):
            pass
    except OSError as error:
        raise ConfigError(f"{option} cannot be written: {error}. Give a file in a writable folder.") from error


def write_report(document: Mapping[str, Any], file: Path, shown: RenderableType, console: Console) -> None:
    """Writes the JSON report and prints its path.

    Raises:
        ConfigError: the file cannot be written. Then ``shown`` is printed on ``console``.
    """
    try:
        write_json(document, file)
    except OSError as error:
        console.print(shown)
        raise ConfigError(f"{file} cannot be written: {error}. The table above shows the results.") from error
    console.print(Text(f"wrote {file}"), soft_wrap=True)


def write_json(document: Mapping[str, Any], file: Path) -> None:
    """Writes JSON, replacing an older file atomically."""
    replace_file(file, json.dumps(_plain(document), indent=1, allow_nan=False) + "\n", mode=0o644)


def read_serve_document(file: Path) -> dict[str, Any]:
    """Reads a report of ``baton bench serve``.

    Raises:
        ConfigError: the file cannot be read, or is of another kind or version.
    """
    try:
        document = json.loads(file.expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"Cannot read {file}: {error}.") from error
    except ValueError as error:
        raise ConfigError(f"{file} is not a report of `baton bench serve --json`: it is not JSON ({error}).") from error
    found = (document.get("format"), document.get("version")) if isinstance(document, dict) else (None, None)
    if found != (SERVE_FORMAT, FORMAT_VERSION):
        raise ConfigError(
            f"{file} is not a report of `baton bench serve --json` of version {FORMAT_VERSION}: it says format "
            f"{found[0]!r}, version {found[1]!r}. Measure again with this version of baton."
        )
    return dict(document)


def _plain(value: Any) -> Any:
    """Converts to JSON values: rounded floats, paths as text, and non-finite floats as null."""
    if isinstance(value, float):
        return round(value, _DIGITS) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
