"""Feeds the index with the events of the workers' prefix caches: one stream for each present worker."""

from __future__ import annotations

import logging

from baton.core.block_hashes import HASH_BYTES
from baton.rpc.wire import worker_pb2
from cluster.prefix_index.prefix_index import PrefixIndex
from cluster.prefix_index.prefix_metrics import PrefixMetrics
from cluster.registry.worker_streams import WorkerStreams
from cluster.registry.workers import Worker

logger = logging.getLogger(__name__)


class PrefixFeed:
    """Follows the prefix caches of all added workers, in the event loop of the router."""

    def __init__(self, index: PrefixIndex, metrics: PrefixMetrics | None = None) -> None:
        self._index = index
        self._metrics = metrics
        self._streams = WorkerStreams(
            "prefix cache events",
            lambda worker: worker.client.watch_cache(),
            self._take,
            index.remove,
            metrics.observe_restart if metrics is not None else lambda: None,
        )
        if metrics is not None:
            metrics.sizes = index.sizes

    def add(self, worker: Worker) -> None:
        """Starts the stream of a worker. Idempotent.

        A worker with another block size gets no stream, so its cache counts as empty.
        """
        if worker.info.block_size == self._index.block_size:
            self._streams.add(worker)
            return
        logger.warning(
            "KV blocks have %d tokens on this worker and %d on others; routing ignores its prefix cache. "
            "Give all workers the same engine.block_size.",
            worker.info.block_size,
            self._index.block_size,
            extra={"worker": worker.info.worker_id},
        )

    def remove(self, worker_id: str) -> None:
        """Ends a worker's stream and forgets its blocks. Unknown workers are ignored."""
        self._streams.remove(worker_id)

    async def close(self) -> None:
        """Ends all streams."""
        await self._streams.close()

    def _take(self, worker: Worker, events: worker_pb2.CacheEvents) -> None:
        worker_id, num_possible = worker.info.worker_id, worker.info.kv_blocks
        self._index.apply(worker_id, events)
        num_known = self._index.num_blocks(worker_id)
        if 0 < num_possible < num_known:
            raise ValueError(f"{num_known} blocks were reported for a cache of {num_possible}")
        if self._metrics is not None:
            num_stored, num_evicted = len(events.stored) // HASH_BYTES, len(events.evicted) // HASH_BYTES
            self._metrics.observe(num_stored, num_evicted, is_snapshot=events.is_snapshot)
