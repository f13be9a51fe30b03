"""``--report``: which files that means, and writing them."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import RenderableType

from baton.bench.charts import Chart
from baton.bench.document import check_writable
from baton.bench.html_report import write_html
from baton.bench.png_report import write_png
from baton.core.errors import ConfigError

_LIBRARIES = {".png": "matplotlib", ".html": "plotly"}


@dataclass(frozen=True, slots=True)
class ReportFiles:
    """Pictures and pages to write."""

    files: tuple[Path, ...] = ()

    def write(self, title: str, tables: RenderableType, charts: Sequence[Chart]) -> None:
        """Raises OSError when one of them cannot be written."""
        for file in self.files:
            if file.suffix == ".png":
                write_png(title, charts, file)
            else:
                write_html(title, tables, charts, file)


def plan_report(target: Path | None, stem: str) -> ReportFiles:
    """What ``target`` asks for: one ``.png`` or ``.html``, or both of them in a folder, by the name of ``stem``.

    Raises:
        ConfigError: it is a file of another kind or cannot be written, or a library is missing. Known before anything
            is measured.
    """
    if target is None:
        return ReportFiles()
    if target.suffix and not target.is_dir() and target.suffix not in _LIBRARIES:
        raise ConfigError(f"--report takes a folder, a .png or an .html; got {target}.")
    if target.suffix in _LIBRARIES and not target.is_dir():
        files: tuple[Path, ...] = (target,)
    else:
        files = tuple(target / f"{stem}{suffix}" for suffix in _LIBRARIES)
    for file in files:
        library = _LIBRARIES[file.suffix]
        if importlib.util.find_spec(library) is None:
            raise ConfigError(f"--report {file} needs {library}. Install it with: pip install 'baton-serve[bench]'")
        check_writable("--report", file)
    return ReportFiles(files)
