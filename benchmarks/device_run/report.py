"""The report of a device run: one JSON object a line, on the disk before anything else happens."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.device_run.part import Row

REPORT_NAME = "report.jsonl"
LOG_NAME = "log.txt"


class Report:
    """Appends one run's rows to ``report.jsonl`` in a folder. Several processes may append, each whole lines.

    Args:
        folder: exists. Earlier runs in it stay.
        run: distinguishes this run's rows from those of earlier ones.
        device: the card's name.
    """

    def __init__(self, folder: Path, run: str, device: str) -> None:
        self.path = folder / REPORT_NAME
        self.log_path = folder / LOG_NAME
        self.device = device
        self._run = run

    def add(self, part: str, row: Row) -> None:
        """Returns when the row is on the disk."""
        frame = {
            "run": self._run,
            "part": part,
            "device": self.device,
            "at": datetime.now(UTC).isoformat("T", "seconds"),
        }
        line = (json.dumps({**frame, **row, **frame}, default=str) + "\n").encode()
        descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":  # a process was killed in the middle of its line
                line = b"\n" + line
            os.write(descriptor, line)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rows(self, part: str | None = None) -> list[dict[str, Any]]:
        """This run's rows of one part, or all. A line that was cut off is left out."""
        if not self.path.exists():
            return []
        found = []
        for line in self.path.read_text(encoding="utf-8", errors="replace").split("\n"):
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(row, dict) and row.get("run") == self._run and part in (None, row.get("part")):
                found.append(row)
        return found

    def log_size(self) -> int:
        """Bytes of the log so far, for :meth:`log_tail`."""
        return self.log_path.stat().st_size if self.log_path.exists() else 0

    def log_tail(self, start: int, num_lines: int) -> list[str]:
        """The last lines that were logged behind ``start``."""
        if not self.log_path.exists():
            return []
        with self.log_path.open("rb") as log:
            log.seek(start)
            return log.read().decode(errors="replace").splitlines()[-num_lines:]
