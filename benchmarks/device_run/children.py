"""Runs a module's checks in child processes, so that one that breaks its process or hangs costs only itself.

The checks of a module are its functions ``names(setting)``, which lists them, and ``check(name, setting)``, which
yields the rows of one. A child reads names from its standard input, one a line, and answers with lines of JSON on its
standard output. Other output, of the child or of a tool around it, is skipped.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from tempfile import TemporaryFile
from typing import IO, Any, TypeAlias

import psutil

from baton.engine.device.device_errors import check_device, is_device_lost, is_out_of_memory
from benchmarks.device_run.part import Row, Setting, device_named
from benchmarks.device_run.report import last_lines

_MAX_PROCESSES = 12
_IS_READY, _ROW, _IS_USABLE = "process is ready", "check row", "process is usable"
_START_S = 120.0
_LAST_LINES, _MOST_LINES, _TRACEBACK_LINES = 6, 200, 12
_NATIVE_FRAME = "frame #"
_END_S = 10.0

_Rows: TypeAlias = "SimpleQueue[tuple[str, Row] | None]"
"""Rows with the names of their checks; ``None`` when a thread has ended."""


def processes_per_gpu() -> int:
    """The number of children that share a GPU at a time: most of their time is spent on compiling."""
    return max(1, min(_MAX_PROCESSES, (os.cpu_count() or 1) - 2))


@dataclass(frozen=True, slots=True)
class Children:
    """Runs checks in child processes.

    Attributes:
        module: full name of the module with the checks.
        num_processes: number of concurrent children.
        limit_s: time limit of one check after its process has started. When it is exceeded, the process and its
            descendants are killed, and the check gets a row that is not ``ok``.
        begin_s: seconds after the start until which checks may begin.
        wrapper: command that runs the child, such as a tool with its options.
        variables: additional environment variables of the child.
    """

    module: str
    num_processes: int
    limit_s: float = 60.0
    begin_s: float = math.inf
    wrapper: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)

    def run(self, names: Sequence[str], setting: Setting) -> Iterator[Row]:
        """Yields the rows of all checks as they arrive. A check that ends its process gives a row that says so."""
        return (row for _, row in self.run_named(names, setting))

    def run_named(self, names: Sequence[str], setting: Setting) -> Iterator[tuple[str, Row]]:
        """Yields what :meth:`run` does, with the name of the check beside each row."""
        waiting, ends_s = deque(names), time.monotonic() + self.begin_s
        rows: _Rows = SimpleQueue()
        count = min(self.num_processes, len(names))
        for _ in range(count):
            threading.Thread(target=self._serve, args=(waiting, ends_s, setting, rows), daemon=True).start()
        while count:
            named_row = rows.get()
            if named_row is None:
                count -= 1
            else:
                yield named_row

    def _serve(self, waiting: deque[str], ends_s: float, setting: Setting, rows: _Rows) -> None:
        """Runs one process at a time until no check is waiting."""
        child: _Child | None = None
        name = self.module
        try:
            while time.monotonic() < ends_s:
                try:
                    name = waiting.popleft()
                except IndexError:
                    break
                child = child or _Child(self, setting)
                try:
                    is_usable = child.check(name, rows)
                except _EndedError as error:
                    rows.put((name, {"name": name, "ok": False, "error": str(error)}))
                    is_usable = False
                if not is_usable:
                    child.end()
                    child = None
        except Exception as error:  # noqa: BLE001 - what keeps a child from starting belongs in the report
            rows.put((name, {"name": name, "ok": False, "error": f"{type(error).__name__}: {error}"}))
        finally:
            if child is not None:
                child.end()
            rows.put(None)


class _EndedError(Exception):
    """A process ended during a check."""


class _Child:
    def __init__(self, how: Children, setting: Setting) -> None:
        command = [*how.wrapper, sys.executable, "-m", __name__, how.module]
        command += ["--device", setting.device.type, "--shape", setting.shape, "--seed", str(setting.seed)]
        self._limit_s = how.limit_s
        self._errors: IO[bytes] = TemporaryFile()  # noqa: SIM115 - open as long as the process
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            errors="replace",
            env={**os.environ, "OMP_NUM_THREADS": "1", **how.variables},
        )
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the child has no pipes")
        self._stdin = self._process.stdin
        self._lines: SimpleQueue[str | None] = SimpleQueue()
        threading.Thread(target=_read, args=(self._process.stdout, self._lines), daemon=True).start()
        self._is_ready = False

    def check(self, name: str, rows: _Rows) -> bool:
        """Runs one check and returns whether the process can run another one.

        Raises:
            _EndedError: the process ended before the check was done.
        """
        if not self._is_ready:
            self._wait_for(_IS_READY, _START_S, name, rows)
            self._is_ready = True
        with suppress(BrokenPipeError):  # its earlier output says why it ended
            self._stdin.write(json.dumps(name) + "\n")
            self._stdin.flush()
        return self._wait_for(_IS_USABLE, self._limit_s, name, rows)

    def _wait_for(self, key: str, limit_s: float, name: str, rows: _Rows) -> bool:
        ends_s = time.monotonic() + limit_s
        while (left_s := ends_s - time.monotonic()) > 0:
            try:
                line = self._lines.get(timeout=left_s)
            except Empty:
                break
            if line is None:
                raise self._ended(f"exit status {self._wait()}")
            answer = _answer_in(line)
            if _ROW in answer:
                rows.put((name, answer[_ROW]))
            if key in answer:
                return bool(answer[key])
        self._kill()
        raise self._ended(f"killed after {limit_s:g} s")

    def _ended(self, why: str) -> _EndedError:
        return _EndedError(f"the check's process ended ({why}): {self._last_words()}")

    def _wait(self) -> int:
        """Returns the exit status. A process that does not end by itself is killed."""
        try:
            return self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._kill()
            return self._process.wait()

    def _kill(self) -> None:
        """Kills the process and its descendants, because the end of a wrapper does not end the check."""
        try:
            started = psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            started = []
        for process in started:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.kill()

    def end(self) -> None:
        """Ends the process and waits for it."""
        with suppress(BrokenPipeError):
            self._stdin.close()
        self._wait()
        self._errors.close()

    def _last_words(self) -> str:
        """The end of what the process printed, without a native stack, which hides the error before it."""
        lines = [line for line in last_lines(self._errors, _MOST_LINES) if not line.startswith(_NATIVE_FRAME)]
        return " | ".join(lines[-_LAST_LINES:]) or "it printed no error"


def _read(stdout: IO[str], lines: SimpleQueue[str | None]) -> None:
    """Reads lines. Runs in a thread, because a descendant that outlives the check may hold the pipe open."""
    try:
        with stdout:
            for line in stdout:
                lines.put(line)
    finally:
        lines.put(None)


def _answer_in(line: str) -> dict[str, Any]:
    try:
        answer = json.loads(line)
    except json.JSONDecodeError:
        return {}
    return answer if isinstance(answer, dict) else {}


def run_here(module: str, names: Sequence[str], setting: Setting) -> Iterator[Row]:
    """Runs checks in this process. Stops after a check that broke the device's context."""
    checks = importlib.import_module(module)
    for name in names:
        is_usable = yield from _rows_of(checks, name, setting)
        if not is_usable:
            return


def _rows_of(checks: Any, name: str, setting: Setting) -> Generator[Row, None, bool]:
    """Yields the rows of one check and returns whether the process can run another one."""
    try:
        yield from checks.check(name, setting)
    except Exception as error:  # noqa: BLE001 - every failure of a check belongs in the report
        tail = traceback.format_exc().splitlines()[-_TRACEBACK_LINES:]
        yield {"name": name, "ok": False, "error": f"{type(error).__name__}: {error}", "traceback": tail}
        if is_device_lost(error):
            return False
    try:
        check_device(setting.device)
    except Exception as error:  # noqa: BLE001 - whatever the device answers, it is an answer
        return is_out_of_memory(error)
    return True


def main() -> None:
    """The main function of a child."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("module")
    parser.add_argument("--device", required=True)
    parser.add_argument("--shape", required=True)
    parser.add_argument("--seed", type=int, required=True)
    arguments = parser.parse_args()
    setting = Setting(device_named(arguments.device), arguments.shape, arguments.seed)
    checks = importlib.import_module(arguments.module)
    _send({_IS_READY: True})
    for line in sys.stdin:
        rows, is_usable = _rows_of(checks, json.loads(line), setting), True
        while True:
            try:
                _send({_ROW: next(rows)})
            except StopIteration as end:
                is_usable = bool(end.value)
                break
        _send({_IS_USABLE: is_usable})
        if not is_usable:
            os._exit(1)  # after a broken CUDA context, a normal exit may hang or crash


def _send(answer: Mapping[str, Any]) -> None:
    sys.stdout.write("\n" + json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
