"""Snapshots of the cluster for many readers at the cost of one."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from baton.core.errors import EndpointFullError, RequestCancelledError
from baton.explain.timelines import Order
from cluster.gateway.http_edge import to_baton_error, until_disconnect
from cluster.gateway.openai.responses import error_body
from cluster.gateway.server_events import encode_event

_INTERVAL_S = 2.0
_MAX_READERS = 64
_SEND_TIMEOUT_S = 10.0
_REST_EVERY = 3
"""The plan and the slow requests change slowly and cost the router most, so only every third snapshot asks for them."""
_NUM_SLOW = 12
"""Number of slow requests in a snapshot."""


class ClusterView(Protocol):
    """What a snapshot has; see :class:`cluster.gateway.gateway.AdminBackend`."""

    async def status(self) -> dict[str, Any]: ...
    async def plan(self) -> dict[str, Any]: ...
    async def requests(self, order: Order, limit: int) -> list[dict[str, Any]]: ...


class LiveFeed:
    """Makes a snapshot in each interval while there are readers, and gives all of them the same bytes.

    A reader that is late gets the newest snapshot and never those in between, so nothing is kept for it.

    Args:
        interval_s: seconds between snapshots.
        max_readers: further readers are refused.
    """

    def __init__(self, view: ClusterView, interval_s: float = _INTERVAL_S, max_readers: int = _MAX_READERS) -> None:
        self._view = view
        self._interval_s = interval_s
        self._max_readers = max_readers
        self._num_readers = 0
        self._making: asyncio.Task[None] | None = None
        self._newest: bytes | None = None
        self._rest: dict[str, Any] = {}
        self._changed = asyncio.Event()  # of the next snapshot; replaced by each one
        self._is_closed = False

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncGenerator[bytes]]:
        """Snapshots as server-sent events, beginning with the present one; they end with :meth:`close`.

        Raises:
            EndpointFullError: there are as many readers as allowed.
        """
        if self._num_readers >= self._max_readers:
            text = f"{self._max_readers} clients read live figures, which is the limit. Close a page, or try again."
            raise EndpointFullError(text, reason="readers")
        self._num_readers += 1
        if self._making is None:
            self._making = asyncio.create_task(self._make())
        try:
            async with contextlib.aclosing(self._snapshots()) as snapshots:
                yield snapshots
        finally:
            self._num_readers -= 1
            if not self._num_readers:
                self._stop_making()

    def close(self) -> None:
        """Ends all readers, so that a server that stops need not wait for them."""
        self._is_closed = True
        self._stop_making()
        self._changed.set()

    async def _snapshots(self) -> AsyncGenerator[bytes]:
        while not self._is_closed:
            changed, newest = self._changed, self._newest
            if newest is not None:
                yield newest
            await changed.wait()

    async def _make(self) -> None:
        for number in itertools.count():
            self._newest = await self._look(is_rest_due=number % _REST_EVERY == 0)
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()
            await asyncio.sleep(self._interval_s)

    def _stop_making(self) -> None:
        if self._making is not None:
            self._making.cancel()
        self._making = self._newest = None

    async def _look(self, *, is_rest_due: bool) -> bytes:
        """A snapshot, or the reason why there is none: readers go on, since the next one may succeed."""
        try:
            if is_rest_due or not self._rest:
                plan, slow = await asyncio.gather(self._view.plan(), self._view.requests("slowest", _NUM_SLOW))
                self._rest = {"plan": plan, "slow_requests": slow}
            return encode_event({"interval_s": self._interval_s, "status": await self._view.status(), **self._rest})
        except Exception as error:  # noqa: BLE001 (whatever fails, the readers learn it)
            return encode_event(error_body(to_baton_error(error, "live")))


class LiveResponse(Response):
    """Sends the snapshots of a feed until the client leaves, the feed ends or the client stops to read.

    Args:
        may_read: asked before each snapshot whether the client may still read it.
        num_snapshots: end after so many; ``None`` means never.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        feed: LiveFeed,
        may_read: Callable[[], bool],
        num_snapshots: int | None,
        send_timeout_s: float = _SEND_TIMEOUT_S,
    ) -> None:
        self.status_code = 200
        self.background = None
        self._feed = feed
        self._may_read = may_read
        self._num_snapshots = num_snapshots
        self._send_timeout_s = send_timeout_s
        # X-Accel-Buffering: nginx would otherwise collect events before it passes them on.
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._feed.reading() as snapshots:
            # A client that left, or does not read: the server closes the incomplete response.
            with contextlib.suppress(RequestCancelledError, OSError):
                await until_disconnect(receive, self._send_all(snapshots, send))

    async def _send_all(self, snapshots: AsyncGenerator[bytes], send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        num_left = self._num_snapshots
        async for snapshot in snapshots:
            if not self._may_read():
                break
            num_left = None if num_left is None else num_left - 1
            async with asyncio.timeout(self._send_timeout_s):
                await send({"type": "http.response.body", "body": snapshot, "more_body": num_left != 0})
            if num_left == 0:
                return
        await send({"type": "http.response.body", "body": b"", "more_body": False})
