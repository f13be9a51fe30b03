"""The report of a device run: one JSON object a line, on the disk before anything else happens."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

REPORT_NAME = "report.jsonl"


class Report:
    """Appends rows to ``report.jsonl`` in a folder. Several processes may append, each whole lines."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / REPORT_NAME

    def add(self, row: dict[str, Any]) -> None:
        """Returns when the row is on the disk."""
        line = json.dumps(row, default=str) + "\n"
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, line.encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rows(self, part: str | None = None) -> list[dict[str, Any]]:
        """Of one part, or all; a last line that was cut off is left out."""
        if not self.path.exists():
            return []
        found = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            if part is None or row.get("part") == part:
                found.append(row)
        return found
