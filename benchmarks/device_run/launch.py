"""Runs parts one after the other, each in its own process, which is forked from this one.

This process has imported torch and transformers, which takes seconds, and has computed nothing: neither CUDA nor the
threads of OpenMP survive a fork. If an import has started CUDA nevertheless, so that a forked process cannot use the
GPU, all parts run in spawned processes.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from types import FrameType

from benchmarks.device_run.machine import MACHINE
from benchmarks.device_run.one_part import TELL_WHERE, run_part
from benchmarks.device_run.part import Part, Row, Setting
from benchmarks.device_run.report import Report

PASSED = "passed"
CANNOT_RUN = "not run here: "
"""Prefix of the status of a part that this machine cannot run at all, which does not count as a failure."""
_MIN_S = 2.0
"""No part begins with less than this left of the budget."""
_POLL_S = 0.1
_TELL_S = 0.3
"""Time for a hanging part to log its stacks."""
_LOG_LINES = 400
"""Enough for the stacks of all threads of a part that hangs."""
_SHARED_MODULES = (
    "torch._dynamo",
    "transformers.models.llama.modeling_llama",
    "baton.engine.async_engine",
    "baton.engine.runner.model_runner",
)


def prepare_process(device: str) -> None:
    """Imports the modules that parts need, so that forked parts do not spend seconds on it. Computes nothing.

    Args:
        device: ``cuda`` or ``cpu``; on ``cpu`` Triton's kernels are interpreted.
    """
    if "cuda" in device:
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # checking for a GPU must not start CUDA here
    else:
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    for name in _SHARED_MODULES:
        importlib.import_module(name)


class Launcher:
    """Runs the parts of one run.

    Args:
        setting: the setting of every part.
        report: receives the rows of all parts and a row with the status of each.
        budget_s: seconds for all parts together, from now on.
        on_ended: called with each part and its status when its rows are complete.
        patience: factor of the parts' limits, which are meant for a GPU.
    """

    def __init__(
        self,
        setting: Setting,
        report: Report,
        budget_s: float,
        on_ended: Callable[[Part, str], None],
        patience: float = 1.0,
    ) -> None:
        self._setting = setting
        self._report = report
        self._ends_s = time.monotonic() + budget_s
        self._on_ended = on_ended
        self._patience = patience
        self._context: BaseContext = multiprocessing.get_context("fork")
        self._stopped_by: signal.Signals | None = None

    def stop_at_signals(self) -> None:
        """Makes SIGTERM and SIGINT end the running part and the run, and ignores SIGHUP."""
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)

    def run(self, parts: Sequence[Part]) -> dict[str, str]:
        """Runs the parts. Returns the status of each by name: ``passed``, why it cannot run here, or what failed."""
        status = self._look_at_machine()
        if status != PASSED:
            return {
                MACHINE.name: status,
                **{part.name: self._report_status(part, "not run: no device") for part in parts},
            }
        return {part.name: self._run_and_report(part) for part in parts}

    def _look_at_machine(self) -> str:
        """Runs the machine part, whose row sets the card's name for all later rows."""
        status = self._run_and_report(MACHINE)
        if status != PASSED and self._setting.device.type == "cuda":
            self._context = multiprocessing.get_context("spawn")
            status = self._run_and_report(MACHINE)
        return status

    def _run_and_report(self, part: Part) -> str:
        left_s = self._ends_s - time.monotonic()
        limit_s = min(part.limit_s * self._patience, left_s)
        started_s, log_start = time.monotonic(), self._report.log_size()
        if self._stopped_by is not None:
            status = f"not run: stopped by {self._stopped_by.name}"
        elif left_s < _MIN_S:
            status = "not run: no budget left"
        else:
            status = self._run(part, limit_s)
        log = [] if status == PASSED else self._report.log_tail(log_start, _LOG_LINES)
        return self._report_status(part, status, limit_s, time.monotonic() - started_s, log)

    def _report_status(
        self, part: Part, status: str, limit_s: float = 0.0, wall_s: float = 0.0, log: Sequence[str] = ()
    ) -> str:
        """Adds a part's last row."""
        self._report.add(part.name, {"status": status, "limit_s": max(limit_s, 0.0), "wall_s": wall_s, "log": log})
        self._on_ended(part, status)
        return status

    def _run(self, part: Part, limit_s: float) -> str:
        rows, rows_of_part = self._context.Pipe()
        num_before = len(self._report.rows(part.name))
        arguments = (part, self._setting, self._report.log_path, rows_of_part)
        process = self._context.Process(target=run_part, args=arguments)  # type: ignore[attr-defined]
        process.start()
        rows_of_part.close()
        with suppress(ProcessLookupError, PermissionError):  # the child does the same; either may come first
            os.setpgid(process.pid, process.pid)
        ends_s = time.monotonic() + limit_s
        is_open, is_done = True, False
        while self._stopped_by is None and time.monotonic() < ends_s:
            if is_open and rows.poll(_POLL_S):
                line = _receive(rows)
                is_open, is_done = line is not None, is_done or line == b""
                if line:
                    self._add(part, json.loads(line))
                    with suppress(OSError):  # the part has ended
                        rows.send_bytes(b"reported")
            elif not process.is_alive():
                break
            elif not is_open:
                process.join(_POLL_S)
        is_late = process.is_alive() and self._stopped_by is None
        if is_late:
            with suppress(ProcessLookupError):
                os.kill(process.pid, TELL_WHERE)
            process.join(_TELL_S)
        with suppress(ProcessLookupError):  # ends all descendants
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
        rows.close()
        if self._stopped_by is not None:
            return f"stopped by {self._stopped_by.name}"
        if is_late:
            return f"killed at its limit of {limit_s:.3g} s"
        code = process.exitcode
        if code < 0:
            return f"killed by {_signal_name(-code)}"
        if not is_done:
            return f"exited with status {code}"
        results = self._report.rows(part.name)[num_before:]
        if not all(row.get("ok", True) for row in results):
            return "failed"
        reasons = dict.fromkeys(row["not_run"] for row in results if "not_run" in row)
        return CANNOT_RUN + "; ".join(reasons) if all("not_run" in row for row in results) else PASSED

    def _add(self, part: Part, row: Row) -> None:
        if part is MACHINE and "cpus" in row:
            self._report.device = row["name"]  # for this row and all later ones
        self._report.add(part.name, row)

    def _stop(self, number: int, _: FrameType | None) -> None:
        self._stopped_by = signal.Signals(number)


def _receive(rows: Connection) -> bytes | None:
    """The next message of a part, or ``None`` when it has ended."""
    try:
        return rows.recv_bytes()
    except (EOFError, OSError):
        return None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
