"""Checks and measures baton on a GPU: ``python -m benchmarks.device_run --out DIR [--budget 480] [--only PART]``.

Each part is a process of its own with its own time limit. Each result is one JSON line in ``DIR/report.jsonl`` that is
on the disk before the next part starts; a table follows each part. A part that fails or hangs does not stop the others.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console

from benchmarks.argument_types import HelpFormatter, over_zero
from benchmarks.device_run.part import PARTS
from benchmarks.device_run.report import Report


def main() -> int:
    """Exit status 0 when all parts passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the report; made if need be")
    parser.add_argument("--budget", type=over_zero, default=480.0, help="seconds for all parts together")
    parser.add_argument("--only", choices=[part.name for part in PARTS], action="append", help="parts to run")
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    parser.add_argument("--shape", choices=["llama-3.1-8b", "tiny"], default="llama-3.1-8b", help="of the model")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    report, console = Report(arguments.out), Console(width=120)
    ends_s = time.monotonic() + arguments.budget
    failed = []
    for part in PARTS:
        if arguments.only and part.name not in arguments.only:
            continue
        limit_s = min(part.limit_s, ends_s - time.monotonic())
        command = [sys.executable, "-m", "benchmarks.device_run.one_part", part.name, "--out", str(arguments.out)]
        command += ["--device", arguments.device, "--shape", arguments.shape]
        started_s = time.monotonic()
        try:
            status = "passed" if subprocess.run(command, timeout=limit_s, check=False).returncode == 0 else "failed"
        except subprocess.TimeoutExpired:
            status = "timed out"
        report.add({"part": part.name, "status": status, "wall_s": round(time.monotonic() - started_s, 1)})
        console.print(part.title, status, report.rows(part.name))
        if status != "passed":
            failed.append(part.name)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
