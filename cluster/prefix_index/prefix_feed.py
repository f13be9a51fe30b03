"""Feeds the index with the events of the workers' prefix caches: one stream for each present worker."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing

from baton.core.block_hashes import HASH_BYTES
from baton.core.errors import BatonError
from baton.process.background import BackgroundTasks
from baton.rpc.wire import worker_pb2
from cluster.prefix_index.prefix_index import PrefixIndex
from cluster.prefix_index.prefix_metrics import PrefixMetrics
from cluster.registry.workers import Worker

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.1
_MAX_PAUSE_S = 5.0
_MAX_DOUBLINGS = 10
_WARN_AT = 3
"""Consecutive failures before a warning. A worker that ends also breaks its stream, before its pool reports it."""


class _NonsenseError(Exception):
    """A worker sent impossible events."""


class PrefixFeed:
    """Follows the prefix caches of all added workers, in the event loop of the router."""

    def __init__(self, index: PrefixIndex, metrics: PrefixMetrics | None = None) -> None:
        self._index = index
        self._metrics = metrics
        self._streams: dict[str, asyncio.Task[None]] = {}
        self._background = BackgroundTasks()
        if metrics is not None:
            metrics.sizes = index.sizes

    def add(self, worker: Worker) -> None:
        """Starts the stream of a worker. Idempotent.

        A worker with another block size gets no stream, so its cache counts as empty.
        """
        info = worker.info
        if info.worker_id in self._streams:
            return
        if info.block_size != self._index.block_size:
            logger.warning(
                "KV blocks have %d tokens on this worker and %d on others; routing ignores its prefix cache. "
                "Give all workers the same engine.block_size.",
                info.block_size,
                self._index.block_size,
                extra={"worker": info.worker_id},
            )
            return
        self._streams[info.worker_id] = self._background.spawn(self._follow(worker))

    def remove(self, worker_id: str) -> None:
        """Ends a worker's stream and forgets its blocks. Unknown workers are ignored."""
        stream = self._streams.pop(worker_id, None)
        if stream is not None:
            stream.cancel()
        self._index.remove(worker_id)

    async def close(self) -> None:
        """Ends all streams."""
        streams = list(self._streams.values())
        for worker_id in list(self._streams):
            self.remove(worker_id)
        await asyncio.gather(*streams, return_exceptions=True)

    async def _follow(self, worker: Worker) -> None:
        """Follows a worker until cancelled, and reconnects after failures.

        The known blocks outlive a broken stream, since most are still cached and the next stream begins with a
        snapshot. If the next stream fails too, they are forgotten.
        """
        worker_id, num_failures = worker.info.worker_id, 0
        while True:
            said_something, reason = False, "the worker ended it"
            try:
                async with aclosing(worker.client.watch_cache()) as messages:
                    async for events in messages:
                        self._take(worker, events)
                        said_something = True
            except BatonError as error:
                reason = error.message
            except _NonsenseError as error:
                reason, said_something = str(error), False
            except Exception:  # routing knows less, but requests go on
                logger.exception("prefix cache events could not be read", extra={"worker": worker_id})
                reason = "see above"
            if said_something:
                num_failures = 0
            else:
                num_failures += 1
                self._index.remove(worker_id)
            level = logging.WARNING if num_failures == _WARN_AT else logging.INFO
            logger.log(level, "a stream of prefix cache events broke: %s", reason, extra={"worker": worker_id})
            if self._metrics is not None:
                self._metrics.observe_restart()
            await asyncio.sleep(min(_MAX_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(num_failures, _MAX_DOUBLINGS)))

    def _take(self, worker: Worker, events: worker_pb2.CacheEvents) -> None:
        worker_id, num_possible = worker.info.worker_id, worker.info.kv_blocks
        try:
            self._index.apply(worker_id, events)
        except ValueError as error:
            raise _NonsenseError(str(error)) from error
        num_known = self._index.num_blocks(worker_id)
        if 0 < num_possible < num_known:
            raise _NonsenseError(f"{num_known} blocks were reported for a cache of {num_possible}")
        if self._metrics is not None:
            num_stored, num_evicted = len(events.stored) // HASH_BYTES, len(events.evicted) // HASH_BYTES
            self._metrics.observe(num_stored, num_evicted, is_snapshot=events.is_snapshot)
