"""Notices that Ray's global control store (GCS) is lost. Requests do not need it; starting a worker does."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable

import grpc.aio

from baton.core.errors import WorkerLostError

_LOOK_EVERY_S = 0.5
_ANSWER_S = 5.0
"""A busy machine may be late."""
_GIVES_UP_VARIABLE = "RAY_gcs_rpc_server_reconnect_timeout_s"
_GIVES_UP_S = 60.0
"""Ray's default."""
_CLEAN_END_SHARE = 0.75
"""Share of that time after which the cluster ends by itself, while it can still do so cleanly."""


def gives_up_s() -> float:
    """Seconds without the GCS after which Ray ends a process of this environment."""
    return float(os.environ.get(_GIVES_UP_VARIABLE, _GIVES_UP_S))


class GcsWatch:
    """Asks the GCS regularly whether it lives.

    Args:
        address: ``host:port`` of the GCS.
        report: called when the GCS is lost, and when it is back.
        on_end: called when the GCS has been lost for so long that the cluster must end.
        answers: whether the GCS answers.
    """

    def __init__(
        self,
        address: str,
        report: Callable[[str], None],
        on_end: Callable[[WorkerLostError], None] = lambda _: None,
        answers: Callable[[str], Awaitable[bool]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._address = address
        self._report = report
        self._on_end = on_end
        self._answers = answers or gcs_answers
        self._clock = clock
        self._lost_since_s: float | None = None

    @property
    def lost_s(self) -> float:
        """Seconds since the GCS was found lost; 0 while it answers."""
        return 0.0 if self._lost_since_s is None else self._clock() - self._lost_since_s

    async def run(self) -> None:
        """Looks until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(_LOOK_EVERY_S)

    async def look(self) -> None:
        """Looks once."""
        if await self._answers(self._address):
            if self._lost_since_s is not None:
                self._report(f"Ray's control store (GCS) at {self._address} is back after {self.lost_s:.0f} s")
            self._lost_since_s = None
        elif self._lost_since_s is None:
            self._lost_since_s = self._clock()
            self._report(
                f"Ray's control store (GCS) at {self._address} does not answer. Requests are served, but no process "
                f"can start. The cluster ends in {_CLEAN_END_SHARE * gives_up_s():.0f} s unless it comes back."
            )
        elif self.lost_s >= _CLEAN_END_SHARE * gives_up_s():
            self._on_end(
                WorkerLostError(
                    f"Ray's control store (GCS) at {self._address} has not answered for {self.lost_s:.0f} s, and Ray "
                    "would soon end the cluster's processes. Start the cluster again; docs/failures.md says how it "
                    "survives the loss of the GCS."
                )
            )


async def gcs_answers(address: str) -> bool:
    """Whether the GCS answers. A connection alone would not show that it is frozen."""
    host, _, port = address.rpartition(":")
    options = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
    try:
        async with asyncio.timeout(_ANSWER_S):
            _, connection = await asyncio.open_connection(host.strip("[]"), int(port))  # at once if it is dead
            connection.close()
            async with grpc.aio.insecure_channel(address, options=options) as channel:
                await channel.channel_ready()
    except (OSError, TimeoutError):
        return False
    return True
