"""How a sequence ended, as metrics, timelines and logs name it: a finish reason, one of these, or an error's code."""

from __future__ import annotations

from engine.request import FinishReason

CANCELLED = "cancelled"
"""The client went away."""
REJECTED = "rejected"
"""The router did not take it in."""
FINISHED = (str(FinishReason.STOP), str(FinishReason.LENGTH))
