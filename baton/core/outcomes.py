"""How a sequence ended, for metrics, timelines and logs: a finish reason, one of these, or an error's code."""

from __future__ import annotations

from baton.core.request import FinishReason

CANCELLED = "cancelled"
"""The client disconnected."""
REJECTED = "rejected"
"""The router refused it: ``router.max_inflight``, or admission control."""
ENDED_BY = "ended_by"
"""Timeline attribute: why a sequence was ended although its client is connected: a stop string in its text, or the
failure of another sequence of its request."""
FINISHED = (str(FinishReason.STOP), str(FinishReason.LENGTH))
