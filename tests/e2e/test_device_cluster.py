"""``benchmarks.device_cluster`` on the CPU: what a GPU machine runs, with a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TIMEOUT_S = 300


@pytest.mark.parametrize(
    "paths",
    [
        ("connections",),
        pytest.param(
            ("shared_memory", "connections", "messages", "nixl", "speed"),
            marks=pytest.mark.thorough(covered_by="[paths0]"),
        ),
    ],
)
def test_cluster_tokens_match_a_single_engine(paths: tuple[str, ...], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.device_cluster", "--out", str(tmp_path)]
    command += ["--device", "cpu", "--shape", "tiny"]
    command += [text for part in paths for text in ("--only", part)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "report.jsonl").read_text().splitlines()]
    statuses = {row["part"]: row["status"] for row in rows if "status" in row}
    if statuses.get("nixl", "").startswith("not run here"):
        paths = tuple(path for path in paths if path != "nixl")
        del statuses["nixl"]
    assert statuses == dict.fromkeys(("machine", "alone", *paths), "passed")
    for path in set(paths) - {"speed"}:
        [row] = [row for row in rows if row["part"] == path and "status" not in row]
        assert row["ok"]
        assert row["equal"] == "10/10"
