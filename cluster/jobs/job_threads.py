"""The threads in which jobs use database and disk, so that the event loop never waits for them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from baton.core.errors import JobsUnavailableError, StorageFullError

logger = logging.getLogger(__name__)

_P = ParamSpec("_P")
_T = TypeVar("_T")

_PATIENCE_S = 10.0
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.5, 30.0


class JobThreads:
    """
    Args:
        num_threads: calls at the same time.
    """

    def __init__(self, num_threads: int = 4) -> None:
        self._pool = ThreadPoolExecutor(num_threads, "jobs")

    async def run(self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Calls ``function`` in a thread. A cancelled caller waits for the end of the call, since nothing stops it."""
        call = asyncio.get_running_loop().run_in_executor(self._pool, lambda: function(*args, **kwargs))
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            await asyncio.wait({call})
            if not call.cancelled():
                call.exception()  # it is of no interest any more
            raise

    async def ask(self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Like :meth:`run`, but does not wait longer than ten seconds.

        The call may still be done later, which must do no harm.

        Raises:
            JobsUnavailableError: there is no answer in time, for instance because the database hangs.
        """
        call = self._pool.submit(function, *args, **kwargs)
        answer = asyncio.wrap_future(call)
        try:
            if not (await asyncio.wait({answer}, timeout=_PATIENCE_S))[0]:
                raise JobsUnavailableError(
                    f"The database of jobs has not answered for {_PATIENCE_S:g} s. Try again when it does."
                )
            return answer.result()
        finally:
            call.cancel()  # at once: the event loop would hand it on only in its next round
            answer.cancel()

    async def insist(self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Like :meth:`run`, but tries again for as long as disk or database fail, since such errors pass."""
        wait_s = _FIRST_RETRY_S
        while True:
            try:
                return await self.run(function, *args, **kwargs)
            except (JobsUnavailableError, StorageFullError) as error:
                logger.error("jobs wait for their storage: %s", error.message)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_RETRY_S)

    def close(self) -> None:
        """Ends the threads after their calls."""
        self._pool.shutdown(wait=False)
