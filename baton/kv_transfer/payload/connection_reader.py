"""Reads a transfer's connections beside its gRPC stream."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from baton.core.errors import TransferError
from baton.kv_transfer.payload.data_listener import ExpectedConnections
from baton.kv_transfer.payload.part_intake import PartIntake
from baton.kv_transfer.payload.raw_socket import NothingCameError

T = TypeVar("T")


class ConnectionReader:
    """Takes parts in from when the connections come, if they do, until :meth:`close`.

    Args:
        silence_s: how long nothing at all may come.
    """

    def __init__(self, expected: ExpectedConnections, intake: PartIntake, silence_s: float) -> None:
        self._intake = intake
        self._silence_s = silence_s
        self._reading = asyncio.create_task(_read(expected, intake))

    async def beside(self, other: Coroutine[Any, Any, T]) -> T:
        """Waits for something else, which ends early when the connection fails.

        Raises:
            BatonError: of a part from the connection; or neither has brought anything for too long.
        """
        waited = asyncio.ensure_future(other)
        waited.add_done_callback(lambda done: done.cancelled() or done.exception())  # if nobody asks any more
        try:
            while not waited.done():
                num_parts = self._intake.num_parts
                both = {waited} if self._reading.done() else {waited, self._reading}
                done, _ = await asyncio.wait(both, timeout=self._silence_s, return_when=asyncio.FIRST_COMPLETED)
                if self._reading.done():
                    self._reading.result()
                if not done and num_parts == self._intake.num_parts:
                    raise TransferError(f"the sender sent nothing for {self._silence_s:g} s.")
            return waited.result()
        finally:
            waited.cancel()

    async def close(self) -> None:
        """Stops reading."""
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)


async def _read(expected: ExpectedConnections, intake: PartIntake) -> None:
    connection = await expected.arrived()
    has_begun = False
    try:
        while True:
            await intake.from_connection(connection)
            has_begun = True
    except OSError as error:
        if isinstance(error, NothingCameError) and not has_begun:
            return  # the sender gave up just before it was welcome, and sends messages
        raise TransferError(f"the sender's connection ended before it had sent everything: {error}.") from error
