"""Compares the kernels of attention and of row quantization with float64: ``--only kernels``.

On CUDA several processes share the cases, because most of the time is spent on compiling. On the CPU a few tiny cases
run in Triton's interpreter.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from benchmarks.device_run import kernel_checks
from benchmarks.device_run.children import Children, processes_per_gpu, run_here
from benchmarks.device_run.part import Row, Setting


def run(setting: Setting) -> Iterator[Row]:
    """Yields a row for each case: the error and the tolerance of the worst number, and their ratio."""
    if importlib.util.find_spec("triton") is None:
        yield {"name": "Triton", "not_run": "triton is not installed"}
        return
    names = kernel_checks.names(setting)
    if setting.device.type == "cuda":
        yield from Children(kernel_checks.__name__, processes_per_gpu()).run(names, setting)
        return
    yield from run_here(kernel_checks.__name__, kernel_checks.ROWS, setting)
    children = Children(kernel_checks.__name__, 1, variables={"TRITON_INTERPRET": "1"})
    yield from children.run([name for name in names if name not in kernel_checks.ROWS], setting)
