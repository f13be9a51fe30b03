"""Checks for :mod:`benchmarks.device_run.children` that end in every way."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator

from benchmarks.device_run.part import Row, Setting


def check(name: str, setting: Setting) -> Iterator[Row]:
    yield {"name": name, "ok": True, "seed": setting.seed, "process": os.getpid()}
    sys.stdout.write('{ "noise": 7\n')
    if name == "raises":
        raise ValueError("a wrong number")
    if name == "breaks the context":
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    if name == "exits":
        sys.stderr.write("Segmentation fault\n" + "frame #7: <unknown function>\n" * 32)
        sys.stderr.flush()
        os._exit(3)
    if name == "hangs":
        time.sleep(600)
    if name == "answers late":
        time.sleep(3)
        yield {"name": name, "ok": True}
