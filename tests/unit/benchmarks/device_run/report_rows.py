"""Reads the report of a device run, without truncated lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def rows_of(folder: Path) -> list[dict[str, Any]]:
    rows = []
    for line in (folder / "report.jsonl").read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def statuses(folder: Path) -> dict[str, str]:
    return {row["part"]: row["status"] for row in rows_of(folder) if "status" in row}


def names(folder: Path, part: str) -> list[str]:
    return [row["name"] for row in rows_of(folder) if row["part"] == part and "name" in row]
