"""How a sequence ended, as metrics, timelines and logs name it: a finish reason, one of these, or an error's code."""

from __future__ import annotations

from baton.core.request import FinishReason

CANCELLED = "cancelled"
"""The client went away."""
REJECTED = "rejected"
"""The router did not take it in: ``router.max_inflight``, or admission."""
ENDED_BY = "ended_by"
"""Attribute of a timeline: how a sequence ended that was closed from outside though its client is there: a stop string
in its text, or the failure of another sequence of its request."""
FINISHED = (str(FinishReason.STOP), str(FinishReason.LENGTH))
