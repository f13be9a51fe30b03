"""The order of waiting requests: by priority, then by deadline. No torch.

All queues use it: the router's, those of prefill and decode workers, and those of simulated ones.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

_MAX_STEPS = 1_000_000.0


class QueuePriority(NamedTuple):
    """A request's place among others.

    Attributes:
        priority: requests with a higher one go first.
        deadline_s: when the first token is due, in monotonic seconds; infinity without a deadline.
        patience_s: each ``patience_s`` that a request is late raises its priority by one, so that no request starves
            behind more urgent ones.
    """

    priority: int = 0
    deadline_s: float = inf
    patience_s: float = inf

    def key(self, now_s: float) -> tuple[float, float]:
        """Returns the sort key; the smaller key goes first."""
        late_s = now_s - self.deadline_s
        steps = late_s / self.patience_s if late_s > 0 and self.patience_s > 0 else 0.0
        return (-(self.priority + min(_MAX_STEPS, steps) // 1), self.deadline_s)


NO_PRIORITY = QueuePriority()
