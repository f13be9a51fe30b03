"""Which of several waiting requests goes first: the higher priority, inside a priority the earlier deadline. No torch.

Used wherever requests wait: in the router, on prefill and on decode workers, and in simulations of them.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

_MAX_STEPS = 1_000_000.0


class QueuePriority(NamedTuple):
    """A request's place among others.

    Attributes:
        priority: requests with a higher one go first.
        deadline_s: when the first token is due, monotonic seconds; infinity if it has no deadline.
        patience_s: a request that is late by this much counts as one priority higher, by twice as much as two higher,
            and so on, so that no request waits for ever behind more urgent ones.
    """

    priority: int = 0
    deadline_s: float = inf
    patience_s: float = inf

    def key(self, now_s: float) -> tuple[float, float]:
        """Smaller goes first."""
        late_s = now_s - self.deadline_s
        steps = late_s / self.patience_s if late_s > 0 and self.patience_s > 0 else 0.0
        return (-(self.priority + min(_MAX_STEPS, steps) // 1), self.deadline_s)


NO_PRIORITY = QueuePriority()
