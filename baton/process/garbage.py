"""Settings that shorten pauses by the garbage collector and by computing threads."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_YOUNG_OBJECTS = 3_000
"""Objects per collection of the youngest generation. Ten thousand would take about ten milliseconds."""
_MIDDLE_ROUNDS, _OLD_ROUNDS = 10, 30
"""Collections of a generation per collection of the next one. The last one looks at every object: 200 ms for those of
8,000 sequences, which is not worth it for less than a million new objects."""
_SWITCH_INTERVAL_S = 0.0005
"""Switch interval of threads. The default of 5 ms would delay tokens."""


def collect_rarely() -> None:
    """Makes garbage collections rare. Call it in a dedicated process when everything is loaded.

    Existing objects (libraries, a vocabulary: about a million) are excluded from later collections. The threshold is
    raised, since one request creates more objects than the default of 700, and almost none are in cycles.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, _MIDDLE_ROUNDS, _OLD_ROUNDS)


def spare_pauses() -> None:
    """Like :func:`collect_rarely`, for processes in which computing threads share the interpreter with a loop."""
    collect_rarely()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)


@contextmanager
def rare_collections() -> Iterator[None]:
    """Applies :func:`collect_rarely` during a block, such as a measurement."""
    before = gc.get_threshold()
    collect_rarely()
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


@contextmanager
def imports_that_stay() -> Iterator[None]:
    """Speeds up imports of large libraries by a fifth, in a dedicated process.

    There are no collections in the block, and objects created in it are excluded from later ones.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
