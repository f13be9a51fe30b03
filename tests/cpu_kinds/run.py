"""Runs tests in a process as on another kind of CPU."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from tests.cpu_kinds.kinds import KINDS, host_features, how_to_run
from tests.cpu_kinds.process import VARIABLE

_ROOT = Path(__file__).parents[2]
_OUTPUT_LINES = 60


@dataclass(frozen=True)
class KindRun:
    """The result of the tests on one kind.

    Args:
        how: how this CPU ran as the kind; ``None`` if it cannot, and nothing ran.
        num_passed, num_skipped, num_failed: numbers of tests.
        output: the end of pytest's output.
    """

    name: str
    how: str | None
    num_passed: int = 0
    num_skipped: int = 0
    num_failed: int = 0
    status: int = 0
    output: str = ""

    @property
    def is_good(self) -> bool:
        """Whether tests passed and none failed, or the kind is not available here."""
        return self.how is None or (self.status == 0 and self.num_passed > 0)

    @property
    def line(self) -> str:
        """A row of the report."""
        if self.how is None:
            return f"{self.name:<15} not on this CPU"
        counts = f"{self.num_passed} passed, {self.num_skipped} skipped, {self.num_failed} failed"
        return f"{self.name:<15} {self.how:<9} {counts}"


def run_as(name: str, arguments: Sequence[str]) -> KindRun:
    """Runs pytest with these arguments as a kind of :data:`tests.cpu_kinds.kinds.KINDS`."""
    how = how_to_run(KINDS[name], host_features())
    if how is None:
        return KindRun(name, None)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={report}", *arguments]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_XDIST")}
        environment[VARIABLE] = name
        ended = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, check=False)
        output = "\n".join((ended.stdout + ended.stderr).splitlines()[-_OUTPUT_LINES:])
        if not report.exists():
            return KindRun(name, how, status=ended.returncode or 1, output=output)
        total, failed, skipped = _counts(report)
        return KindRun(name, how, total - failed - skipped, skipped, failed, ended.returncode, output)


def _counts(report: Path) -> tuple[int, int, int]:
    """The numbers of all tests, of failed tests including errors, and of skipped tests."""
    suites = ElementTree.parse(report).getroot().iter("testsuite")
    sizes = [{key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")} for suite in suites]
    total, failures, errors, skipped = (sum(size[key] for size in sizes) for key in sizes[0])
    return total, failures + errors, skipped
