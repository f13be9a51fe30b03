"""Streams of messages from the workers, one from each, which are opened again after failures."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Generic, TypeVar

from baton.core.errors import BatonError
from baton.process.background import BackgroundTasks
from cluster.registry.workers import Worker

logger = logging.getLogger(__name__)

MessageT = TypeVar("MessageT")

_FIRST_PAUSE_S = 0.1
_MAX_PAUSE_S = 5.0
_MAX_DOUBLINGS = 10
_WARN_AT = 3
"""Consecutive failures before a warning. A worker that ends also breaks its stream, before its pool reports it."""


class WorkerStreams(Generic[MessageT]):
    """Follows one stream of every added worker, in the event loop of the router.

    What a stream said outlives its end, since most of it is still true and the next stream begins with a snapshot. If
    the next stream fails too, or sends nonsense, it is forgotten.

    Args:
        name: of the messages, for the log.
        watch: opens the stream of a worker.
        take: takes a message. Raises :class:`ValueError` for an impossible one.
        forget: forgets what the worker with this id has said.
        observe_restart: called whenever a stream has ended.
    """

    def __init__(
        self,
        name: str,
        watch: Callable[[Worker], AsyncGenerator[MessageT]],
        take: Callable[[Worker, MessageT], None],
        forget: Callable[[str], None],
        observe_restart: Callable[[], None] = lambda: None,
    ) -> None:
        self._name = name
        self._watch = watch
        self._take = take
        self._forget = forget
        self._observe_restart = observe_restart
        self._streams: dict[str, asyncio.Task[None]] = {}
        self._background = BackgroundTasks()

    def add(self, worker: Worker) -> None:
        """Starts the stream of a worker. Idempotent."""
        if worker.info.worker_id not in self._streams:
            self._streams[worker.info.worker_id] = self._background.spawn(self._follow(worker))

    def remove(self, worker_id: str) -> None:
        """Ends a worker's stream and forgets what it said. Unknown workers are ignored."""
        stream = self._streams.pop(worker_id, None)
        if stream is not None:
            stream.cancel()
        self._forget(worker_id)

    async def close(self) -> None:
        """Ends all streams."""
        streams = list(self._streams.values())
        for worker_id in list(self._streams):
            self.remove(worker_id)
        await asyncio.gather(*streams, return_exceptions=True)

    async def _follow(self, worker: Worker) -> None:
        worker_id, num_failures = worker.info.worker_id, 0
        while True:
            said_something, reason = False, "the worker ended it"
            try:
                async with aclosing(self._watch(worker)) as messages:
                    async for message in messages:
                        self._take(worker, message)
                        said_something = True
            except BatonError as error:
                reason = error.message
            except ValueError as error:
                reason, said_something = str(error), False
            except Exception:  # routing knows less, but requests go on
                logger.exception("%s could not be read", self._name, extra={"worker": worker_id})
                reason = "see above"
            if said_something:
                num_failures = 0
            else:
                num_failures += 1
                self._forget(worker_id)
            level = logging.WARNING if num_failures == _WARN_AT else logging.INFO
            logger.log(level, "a stream of %s broke: %s", self._name, reason, extra={"worker": worker_id})
            self._observe_restart()
            await asyncio.sleep(min(_MAX_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(num_failures, _MAX_DOUBLINGS)))
