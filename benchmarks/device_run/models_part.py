"""Whole tiny models in float32: the same tokens by graphs, overlap and every speculation method: ``--only models``.

On CUDA the models are shared by several processes, so that a recording that breaks one costs one row.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.device_run import model_checks
from benchmarks.device_run.children import Children, processes_per_gpu, run_here
from benchmarks.device_run.part import Row, Setting


def run(setting: Setting) -> Iterator[Row]:
    """A row for each comparison of tokens."""
    names = model_checks.names(setting)
    if setting.device.type == "cuda":
        yield from Children(model_checks.__name__, processes_per_gpu()).run(names, setting)
        return
    yield from run_here(model_checks.__name__, names, setting)
    yield {"name": "graphs", "not_run": "needs CUDA"}
