"""The process of one part."""

from __future__ import annotations

import ctypes
import faulthandler
import io
import json
import logging
import os
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.device_run.part import Part, Row, Setting
from benchmarks.device_run.report import as_json

_PR_SET_PDEATHSIG = 1
_TRACEBACK_LINES = 12
TELL_WHERE = signal.SIGUSR1
"""The signal on which the process of a part writes the stacks of all threads to the log."""


def run_part(part: Part, setting: Setting, log: Path, launcher: Connection) -> None:
    """Sends a part's rows to the launcher, each once the previous one is in the report, then empty bytes.

    The part's output goes to the log.
    """
    parent = os.getppid()
    _leave_the_parent(log)
    if os.getppid() != parent:  # the parent died before PDEATHSIG was set
        os._exit(1)
    faulthandler.enable(2)
    faulthandler.register(TELL_WHERE, file=2)
    logging.basicConfig(level=logging.WARNING, force=True)
    torch.manual_seed(setting.seed)
    if setting.device.type == "cpu" and setting.is_tiny:
        torch.set_num_threads(1)  # tiny products take less time than waking threads
    num_rows = 0
    try:
        for row in part.load()(setting):
            _send(launcher, row)
            num_rows += 1
        if not num_rows:
            raise RuntimeError(f"the part {part.name} gave no result")
    except (Exception, SystemExit) as error:  # noqa: BLE001 - every failure of a part belongs in its report
        traceback.print_exc()
        tail = traceback.format_exc().splitlines()[-_TRACEBACK_LINES:]
        text = f"{type(error).__name__}: {error}"
        _send(launcher, {"name": "failure", "ok": False, "error": text, "traceback": tail})
    sys.stdout.flush()
    launcher.send_bytes(b"")
    os._exit(0)  # after a broken CUDA context, a normal exit may hang or crash


def _send(launcher: Connection, row: Row) -> None:
    """Sends a row and waits until the launcher has handled it."""
    launcher.send_bytes(json.dumps(as_json(row)).encode())
    launcher.recv_bytes()


class _LossyFile(io.FileIO):
    """The standard output of a part, which ignores a full disk."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def _leave_the_parent(log_path: Path) -> None:
    """Creates a process group, arranges to die with the parent, and redirects the output to the log."""
    os.setpgid(0, 0)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    log = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    raw = _LossyFile(2, "w", closefd=False)
    sys.stdout = sys.stderr = io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8", line_buffering=True)
