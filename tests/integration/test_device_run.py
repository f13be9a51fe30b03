"""The whole device run on the CPU, with tiny shapes: what runs on a GPU machine has run before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.device_run.part import PARTS

_ROOT = Path(__file__).resolve().parents[2]


def test_every_part_passes_on_the_cpu(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.device_run", "--out", str(tmp_path), "--device", "cpu"]
    done = subprocess.run(
        [*command, "--shape", "tiny", "--patience", "5"],
        cwd=_ROOT,
        env={**os.environ, "PYTHONPATH": str(_ROOT)},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    rows = [json.loads(line) for line in (tmp_path / "report.jsonl").read_text().splitlines()]
    statuses = {row["part"]: row["status"] for row in rows if "status" in row}
    expected = dict.fromkeys(["machine", *(part.name for part in PARTS)], "passed")
    assert statuses == expected | {"sanitizer": "not run here: needs CUDA"}, done.stdout
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) < 12_000, "a GPU machine gives no more than that back"
    for part in PARTS:
        results = [row for row in rows if row["part"] == part.name and "status" not in row]
        assert results
        assert all(row["device"] == "cpu" and row["name"] for row in results)
