"""Prefers workers that hold the prompt's beginning: the share of the prompt that need not be computed.

Predictions contain what that saves this request. What it saves those behind it, and that pieces of one conversation
stay together, is what this adds.
"""

from __future__ import annotations

from cluster.routing.base import Candidates, Floats, WorkerSnapshot


class PrefixAffinity:
    """Implements :class:`cluster.routing.base.Scorer`."""

    def score(self, candidates: Candidates) -> Floats:
        num_tokens = max(1, candidates.request.num_prompt_tokens)

        def share(worker: WorkerSnapshot) -> float:
            return min(1.0, worker.cached_tokens / num_tokens)

        return candidates.by_computing(
            [share(worker) for worker in candidates.prefill_workers],
            [share(worker) for worker in candidates.decode_workers],
        )
