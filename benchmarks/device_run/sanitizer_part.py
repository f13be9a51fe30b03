"""Runs the smallest attention cases under compute-sanitizer, to detect out-of-bounds accesses: ``--only sanitizer``.

Torch's caching allocator is off, so that each tensor is a separate allocation with its own bounds.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.device_run import kernel_checks
from benchmarks.device_run.attention_cases import smallest
from benchmarks.device_run.children import Children
from benchmarks.device_run.part import Row, Setting

_TOOL = "compute-sanitizer"
_NUM_CASES = 12
_NAME = f"{_TOOL} memcheck"
_MAX_LINES = 30
_BEGIN_S = 25.0
"""Cases begin within this time, so that the process ends and the tool counts the errors within the part's limit."""
_CASE_LIMIT_S = 15.0


def run(setting: Setting) -> Iterator[Row]:
    """Yields a row for each case, then one with the tool's findings. If the tool cannot run, one row says why."""
    if setting.device.type != "cuda":
        yield {"name": _NAME, "not_run": "needs CUDA"}
        return
    tool = shutil.which(_TOOL)
    if tool is None:
        yield {"name": _NAME, "not_run": f"{_TOOL} is not on the PATH; it comes with NVIDIA's CUDA toolkit"}
        return
    cases = smallest(kernel_checks.attention_cases(setting.is_tiny, setting.seed), _NUM_CASES)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "memcheck.%p.log"
        options = {"tool": "memcheck", "target-processes": "application-only", "report-api-errors": "no"}
        wrapper = [tool, *(word for name, value in options.items() for word in (f"--{name}", value))]
        wrapper += ["--log-file", str(log)]
        variables = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        children = Children(kernel_checks.__name__, 1, _CASE_LIMIT_S, _BEGIN_S, wrapper, variables)
        num_run, failures = 0, list[Row]()
        for row in children.run(cases, setting):
            if "worst_error" in row:
                num_run += 1
                yield row
            else:
                failures.append(row)
        found = summary([path.read_text(errors="replace") for path in Path(folder).iterdir()], num_run)
        if num_run or "ok" in found:
            yield from failures
            yield found
        else:
            why = f"{found['not_run']}; {failures[0].get('error')}" if failures else found["not_run"]
            yield {**found, "not_run": why}


def summary(logs: list[str], num_cases: int) -> Row:
    """The findings in the tool's logs about all cases."""
    lines = [line.removeprefix("=========").strip() for log in logs for line in log.splitlines()]
    counts = [int(found[1]) for line in lines if (found := re.match(r"ERROR SUMMARY: (\d+) error", line))]
    row = {"name": _NAME, "cases": num_cases, "errors_found": sum(counts)}
    if not counts:
        # The tool does not work on every device: a virtual machine may forbid it.
        return {**row, "not_run": "it did not finish: " + " | ".join(line for line in lines[-6:] if line)}
    if sum(counts):
        return {**row, "ok": False, "error": f"{sum(counts)} memory errors", "traceback": lines[:_MAX_LINES]}
    return {**row, "ok": True}
