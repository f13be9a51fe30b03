"""The generated pages of docs/reference. ``tests/unit/test_reference_pages.py`` fails when one is not current."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from tests.reference_pages import command_line, configuration, endpoints, metrics

FOLDER = Path(__file__).parents[2] / "docs" / "reference"
PAGES: Mapping[str, Callable[[], str]] = {
    "configuration.md": configuration.render,
    "command-line.md": command_line.render,
    "http.md": endpoints.render,
    "metrics.md": metrics.render,
}
