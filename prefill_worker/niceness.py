"""How much prefill yields to decode workers on the same cores."""

from __future__ import annotations

from typing import Literal

_WITH_MATRIX_UNIT = 10


def pick_niceness(niceness: int | Literal["auto"], *, on_cpu: bool, has_tiles: bool) -> int:
    """The niceness (nice(1)) of a prefill worker's engine.

    At niceness 10 a process gets a tenth of a contended core. With a matrix unit, prompts take a small part of the time
    that decoding takes, so a tenth and the idle time are enough. Without one, prompts are most of the work: if they
    yielded, they would wait for seconds, and decode batches would be too small.
    """
    if not on_cpu:
        return 0
    if niceness == "auto":
        return _WITH_MATRIX_UNIT if has_tiles else 0
    return niceness
