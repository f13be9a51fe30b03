"""How exactly the timers of an event loop keep their time."""

from __future__ import annotations

RESOLUTION_S = 1e-6
"""Timers fire early by as much as their clock cannot tell apart. In virtual time, waiting for the rest of it would not
bring the time on."""


def is_over(left_s: float) -> bool:
    """Whether so little is left of a wait that nobody can wait for it any more."""
    return left_s <= RESOLUTION_S
