"""Precision of event-loop timers."""

from __future__ import annotations

RESOLUTION_S = 1e-6
"""Timers fire early by up to their clock's resolution. In virtual time, waiting for the remainder would not advance the
clock."""


def has_expired(left_s: float) -> bool:
    """Whether the rest of a wait is below the timers' resolution."""
    return left_s <= RESOLUTION_S
