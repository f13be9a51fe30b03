"""Settings that shorten pauses by the garbage collector and by computing threads."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_YOUNG_OBJECTS = 3_000
"""Objects per collection of the youngest generation. Ten thousand would take about ten milliseconds."""
_MIDDLE_ROUNDS, _OLD_ROUNDS = 10, 30
"""Collections of a generation per collection of the next one. The last one looks at every object: 200 ms for those of
8,000 sequences, which is not worth it for less than a million new objects."""
_LATEST_ROUNDS = 300
"""The same with :class:`QuietCollections`: after nine million new objects without a quiet moment."""
_QUIET_BLOCKS = 400_000
"""Blocks of memory beyond those of the loaded objects. A full collection of so many takes about 20 ms."""
_QUIET_POLL_S = 1.0
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


class QuietCollections:
    """Full collections wait for a moment with few objects, since their pause grows with the number of objects.

    Create it after :func:`collect_rarely`. A process that is never quiet has its full collections ten times as rarely.
    """

    def __init__(self) -> None:
        self._num_loaded = sys.getallocatedblocks()
        gc.set_threshold(_YOUNG_OBJECTS, _MIDDLE_ROUNDS, _LATEST_ROUNDS)

    async def run(self) -> None:
        """Collects at quiet moments until it is cancelled."""
        while True:
            await asyncio.sleep(_QUIET_POLL_S)
            self.collect_if_quiet()

    def collect_if_quiet(self) -> bool:
        """Collects if a collection is due and would be short. Returns whether it did."""
        num_rounds = gc.get_count()[2]
        if num_rounds < _OLD_ROUNDS or sys.getallocatedblocks() - self._num_loaded > _QUIET_BLOCKS:
            return False
        gc.collect()
        return True


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
