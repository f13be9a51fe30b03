"""Prefers decode workers with room: the share of the KV cache that is free with the request in it.

Where the cache's size is not known, the share of free seats stands for it.
"""

from __future__ import annotations

from cluster.routing.base import Candidates, Floats, WorkerSnapshot


class KVUse:
    """Implements :class:`cluster.routing.base.Scorer`."""

    def score(self, candidates: Candidates) -> Floats:
        num_tokens = candidates.request.num_prompt_tokens
        return candidates.by_decode([_free_share(worker, num_tokens) for worker in candidates.decode_workers])


def _free_share(worker: WorkerSnapshot, num_tokens: int) -> float:
    if worker.kv_tokens > 0:
        used = (worker.context_tokens + num_tokens) / worker.kv_tokens
    else:
        used = (worker.batch + 1) / max(1, worker.max_num_seqs)
    return min(1.0, max(0.0, 1.0 - used))
