"""Gives every Python process that has this folder in its ``PYTHONPATH`` a time of day that a test can set.

A file in ``$BATON_TEST_CLOCKS``, named by the process's id, has the seconds by which its clock has jumped. Monotonic
clocks do not jump. Neither does the clock of gRPC's Python part, which computes deadlines for a core in C that reads
the system's clock.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress

_real_time, _real_time_ns = time.time, time.time_ns
_folder = os.environ.get("BATON_TEST_CLOCKS", "")


def _jump_s() -> int:
    if sys._getframe(2).f_globals.get("__name__", "").startswith("grpc."):
        return 0
    with suppress(OSError, ValueError), open(f"{_folder}/{os.getpid()}", encoding="ascii") as file:
        return int(file.read())
    return 0


time.time = lambda: _real_time() + _jump_s()
time.time_ns = lambda: _real_time_ns() + _jump_s() * 10**9
