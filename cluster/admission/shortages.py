"""When there was too little room lately, and for whom. Pure; no clock of its own."""

from __future__ import annotations

from math import inf

_LASTS_S, _LASTS_WAITING_S = 10.0, 2.0
"""So long after somebody who could keep its targets found no room, others step back: those who come, and those who
wait, who can go as soon as it is over."""


class Shortages:
    """Of requests that could keep their targets. Those who are lost do not count: they find no room because others do
    not."""

    def __init__(self) -> None:
        self._by_priority: dict[int, float] = {}

    def note(self, priority: int, now_s: float) -> None:
        """One of this priority found no room."""
        self._by_priority[priority] = now_s

    def lasts(self, now_s: float, *, waiting: bool, above: float = -inf) -> bool:
        """Whether one of a higher priority than ``above`` has lately found no room.

        Args:
            waiting: whoever asks waits already.
        """
        return now_s < self._latest_s(above) + (_LASTS_WAITING_S if waiting else _LASTS_S)

    def left_s(self, now_s: float) -> float:
        """Seconds until :meth:`lasts` is over for those that wait, be they of any priority; 0: it is over."""
        return max(0.0, self._latest_s(-inf) + _LASTS_WAITING_S - now_s)

    def _latest_s(self, above: float) -> float:
        return max((at_s for priority, at_s in self._by_priority.items() if priority > above), default=-inf)
