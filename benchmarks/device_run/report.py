"""The report of a device run: one JSON object per line, each synced to disk before the run continues."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import numpy
import torch

from benchmarks.device_run.part import Row

REPORT_NAME = "report.jsonl"
LOG_NAME = "log.txt"
_MAX_TAIL_BYTES = 64 * 1024


class Report:
    """Appends one run's rows to ``report.jsonl`` in a folder, and keeps them in memory.

    Args:
        folder: an existing folder. Earlier runs in it are kept.
        run: distinguishes this run's rows from those of earlier runs.
        device: the card's name.

    Attributes:
        problem: why the last rows could not be written; they are retried with the next row.
    """

    def __init__(self, folder: Path, run: str, device: str) -> None:
        self.path = folder / REPORT_NAME
        self.log_path = folder / LOG_NAME
        self.device = device
        self.problem: OSError | None = None
        self._run = run
        self._rows: list[dict[str, Any]] = []
        self._unwritten: list[bytes] = []

    def open(self) -> None:
        """Creates the report and the log.

        Raises:
            OSError: the files cannot be written.
        """
        for path in (self.path, self.log_path):
            os.close(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644))

    def add(self, part: str, row: Row) -> None:
        """Writes a row to the disk; if that fails, ``problem`` says why."""
        frame = {
            "run": self._run,
            "part": part,
            "device": self.device,
            "at": datetime.now(UTC).isoformat("T", "seconds"),
        }
        framed = as_json({**frame, **row, **frame})
        self._rows.append(framed)
        self._unwritten.append((json.dumps(framed, allow_nan=False) + "\n").encode())
        try:
            self._write(b"".join(self._unwritten))
        except OSError as error:
            self.problem = error
        else:
            self.problem = None
            self._unwritten.clear()

    def _write(self, lines: bytes) -> None:
        descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":  # the last line was cut
                lines = b"\n" + lines
            while lines:
                lines = lines[os.write(descriptor, lines) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rows(self, part: str | None = None) -> list[dict[str, Any]]:
        """This run's rows, of one part or of all parts."""
        return [row for row in self._rows if part in (None, row["part"])]

    def log_size(self) -> int:
        """The size of the log in bytes, for :meth:`log_tail`."""
        return self.log_path.stat().st_size if self.log_path.exists() else 0

    def log_tail(self, start: int, num_lines: int) -> list[str]:
        """The last lines of the log after the byte ``start``; empty if the log is a device rather than a file."""
        if not self.log_path.is_file():
            return []
        with self.log_path.open("rb") as log:
            return last_lines(log, num_lines, start)


def last_lines(file: IO[bytes], num_lines: int, start: int = 0) -> list[str]:
    """The last lines of a file after the byte ``start``, from at most its last 64 KiB."""
    size = file.seek(0, os.SEEK_END)
    begin = file.seek(max(start, size - _MAX_TAIL_BYTES))
    return file.read(max(size - begin, 0)).decode(errors="replace").splitlines()[-num_lines:]


def as_json(value: Any) -> Any:
    """The value in JSON's types: NaN and infinity become null, and numbers of numpy and torch become Python's."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): as_json(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(each) for each in value]
    if isinstance(value, (numpy.generic, torch.Tensor)):
        return as_json(value.tolist())
    return str(value)
