"""The process of one part: ``python -m benchmarks.device_run.one_part NAME --out DIR --device D --shape S``."""

from __future__ import annotations

import argparse
import logging
import sys
import traceback
from pathlib import Path

from benchmarks.device_run.part import PARTS, Setting
from benchmarks.device_run.report import Report
from engine.model_loader import pick_device


def main() -> int:
    """Exit status 0 when every row that was checked is right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=[part.name for part in PARTS])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--shape", required=True)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    part = next(part for part in PARTS if part.name == arguments.part)
    report = Report(arguments.out)
    setting = Setting(pick_device(arguments.device), arguments.shape)
    is_right = True
    try:
        for row in part.load()(setting):
            report.add({"part": part.name, "device": setting.device_name, **row})
            is_right &= bool(row.get("ok", True))
    except Exception as error:  # noqa: BLE001 - whatever broke the part belongs into its report
        report.add(
            {
                "part": part.name,
                "device": setting.device_name,
                "name": "failure",
                "ok": False,
                "error": f"{type(error).__name__}: {error}",
                "traceback": traceback.format_exc().splitlines()[-12:],
            }
        )
        traceback.print_exc()
        is_right = False
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
