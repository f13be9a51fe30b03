"""Prefers short queues: ``1 / (1 + prompts ahead)`` on the worker that computes the prompt."""

from __future__ import annotations

from cluster.routing.base import Candidates, Floats


class QueueDepth:
    """Implements :class:`cluster.routing.base.Scorer`."""

    def score(self, candidates: Candidates) -> Floats:
        return candidates.by_computing(
            [1 / (1 + worker.queue.prompts) for worker in candidates.prefill_workers],
            [1 / (1 + worker.queue.prompts) for worker in candidates.decode_workers],
        )
