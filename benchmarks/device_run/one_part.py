"""What happens in the process of one part."""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import signal
import sys
import traceback

import torch

from benchmarks.device_run.part import Part, Setting
from benchmarks.device_run.report import Report

_PR_SET_PDEATHSIG = 1
_TRACEBACK_LINES = 12
TELL_WHERE = signal.SIGUSR1
"""Makes the process of a part write the stacks of all its threads to the log."""


def run_part(part: Part, setting: Setting, report: Report) -> None:
    """Adds a part's rows to the report and exits with status 0 when every row that was checked is right.

    What the part prints goes to the log.
    """
    parent = os.getppid()
    _leave_the_parent(report)
    if os.getppid() != parent:  # it died before this process would have been told
        os._exit(1)
    faulthandler.enable(2)
    faulthandler.register(TELL_WHERE, file=2)
    logging.basicConfig(level=logging.WARNING, force=True)
    torch.manual_seed(setting.seed)
    if setting.device.type == "cpu" and setting.is_tiny:
        torch.set_num_threads(1)  # tiny products wait for their threads longer than they take
    num_rows, is_right = 0, True
    try:
        for row in part.load()(setting):
            report.add(part.name, row)
            num_rows += 1
            is_right &= bool(row.get("ok", True))
        if not num_rows:
            raise RuntimeError(f"the part {part.name} gave no result")
    except Exception as error:  # noqa: BLE001 - whatever broke the part belongs into its report
        traceback.print_exc()
        tail = traceback.format_exc().splitlines()[-_TRACEBACK_LINES:]
        text = f"{type(error).__name__}: {error}"
        report.add(part.name, {"name": "failure", "ok": False, "error": text, "traceback": tail})
        is_right = False
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if is_right else 1)  # a broken CUDA context makes an orderly end hang or crash


def _leave_the_parent(report: Report) -> None:
    """Makes a process group of its own, ends with the parent, and writes to the log."""
    os.setpgid(0, 0)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    log = os.open(report.log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout = sys.stderr = open(2, "w", encoding="utf-8", buffering=1, closefd=False)  # noqa: SIM115
