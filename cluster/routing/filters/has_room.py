"""Leaves out workers that have no seat or no KV blocks left for the request, unless that is all of them.

A request that fits nowhere waits on a worker as well as it would anywhere else.
"""

from __future__ import annotations

from collections.abc import Sequence

from cluster.routing.base import RoutingRequest, WorkerSnapshot


class HasRoom:
    """Implements :class:`cluster.routing.base.Filter`."""

    def filter(self, workers: Sequence[WorkerSnapshot], request: RoutingRequest) -> list[WorkerSnapshot]:
        return [worker for worker in workers if worker.has_seat(request.num_tokens)] or list(workers)
