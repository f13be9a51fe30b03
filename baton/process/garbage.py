"""What makes a process pause in which others wait for answers: the garbage collector, and threads that compute."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_YOUNG_OBJECTS = 3_000
"""Some ten thousand would take ten milliseconds at a time."""
_SWITCH_S = 0.0005
"""After so long a thread that computes lets another one go on; usually it is 5 ms, for which tokens would wait."""


def collect_rarely() -> None:
    """Call it when everything is loaded, in a process of one's own.

    What is there by then (libraries, a vocabulary: a million objects) stays, and no later collection looks at it again.
    Collections become rarer: one request makes more objects than the usual 700, and nearly none of them are in cycles.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS)


def spare_pauses() -> None:
    """:func:`collect_rarely` in a process where threads that compute share the interpreter with an event loop."""
    collect_rarely()
    sys.setswitchinterval(_SWITCH_S)


@contextmanager
def rare_collections() -> Iterator[None]:
    """:func:`collect_rarely` for as long as something is measured in a process that goes on."""
    before = gc.get_threshold()
    collect_rarely()
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


@contextmanager
def imports_that_stay() -> Iterator[None]:
    """Around imports of large libraries, in a process of one's own, which are a fifth faster this way.

    Nothing is collected meanwhile, and no later collection looks at what was made.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
