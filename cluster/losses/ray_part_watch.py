"""Notices that a process of Ray that a cluster needs is lost or hangs: its global control store (GCS) or a raylet.

Requests need neither; starting a worker needs both.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum

import grpc.aio

from baton.core.errors import WorkerLostError

_LOOK_EVERY_S = 0.5
_ANSWER_S = 5.0
"""A busy machine may be late."""
_DOUBT_S = 1.0
_LONGEST_LOOK_S = _LOOK_EVERY_S + _ANSWER_S + 1.0
"""A longer time between two looks is a delay of this process, and does not count against Ray."""
_GIVES_UP_VARIABLE = "RAY_gcs_rpc_server_reconnect_timeout_s"
_GIVES_UP_S = 60.0
"""Ray's default. A raylet that hangs is given up after 65 s."""
_CLEAN_END_SHARE = 0.75
"""Share of that time after which the cluster ends by itself, while it can still do so cleanly."""


class Reply(StrEnum):
    """How a process of Ray answers."""

    ANSWERS = "answers"
    SILENT = "silent"
    REFUSES = "refuses"
    """Nothing listens: it has ended."""


@dataclass(frozen=True, slots=True)
class RayPart:
    """A process of Ray.

    Attributes:
        name: for people.
        address: ``host:port`` of its gRPC server.
        ends_after_s: seconds without it after which the cluster ends by itself.
        remedy: what to do then, in a sentence.
        may_return: whether another process may take its place at the address.
    """

    name: str
    address: str
    ends_after_s: float
    remedy: str
    may_return: bool

    def __str__(self) -> str:
        return f"{self.name} at {self.address}"


def gcs_part(address: str) -> RayPart:
    """The global control store. Ray ends each process that has missed it for too long."""
    gives_up_s = float(os.environ.get(_GIVES_UP_VARIABLE, _GIVES_UP_S))
    remedy = "Start the cluster again; docs/failures.md says how it survives the loss of the GCS."
    return RayPart("Ray's control store (GCS)", address, _CLEAN_END_SHARE * gives_up_s, remedy, may_return=True)


def raylet_part(address: str) -> RayPart:
    """The raylet of the node of `baton up`. Ray gives up a node whose raylet is silent for too long."""
    ends_after_s = _CLEAN_END_SHARE * _GIVES_UP_S
    return RayPart("Ray's raylet", address, ends_after_s, "Start the cluster again.", may_return=False)


class RayPartWatch:
    """Asks a process of Ray regularly whether it lives.

    Args:
        report: called when it is lost, and when it is back.
        on_end: called when it has been lost for so long that the cluster must end.
        ask: how it answers at an address.
    """

    def __init__(
        self,
        part: RayPart,
        report: Callable[[str], None],
        on_end: Callable[[WorkerLostError], None] = lambda _: None,
        ask: Callable[[str], Awaitable[Reply]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._part = part
        self._report = report
        self._on_end = on_end
        self._ask = ask or ask_part
        self._clock = clock
        self._is_lost = False
        self._lost_s = 0.0
        self._looked_s = clock()  # when the last look ended
        self._asked_s: float | None = None  # when the open question was asked

    @property
    def is_in_doubt(self) -> bool:
        """Whether it does not answer, or has not for a second."""
        asked_s = self._asked_s
        return self._is_lost or (asked_s is not None and self._clock() - asked_s >= _DOUBT_S)

    async def run(self) -> None:
        """Looks until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(_LOOK_EVERY_S)

    async def look(self) -> None:
        """Looks once."""
        self._asked_s = self._clock()
        reply = await self._ask(self._part.address)
        now_s = self._clock()
        passed_s, self._looked_s = min(now_s - self._looked_s, _LONGEST_LOOK_S), now_s
        self._asked_s = None
        if reply is Reply.ANSWERS:
            if self._is_lost:
                self._report(f"{self._part} is back after {self._lost_s + passed_s:.0f} s")
            self._is_lost = False
        elif reply is Reply.REFUSES and not self._part.may_return:
            self._is_lost = True
            self._on_end(WorkerLostError(f"{self._part} has ended, and all on this node with it. {self._part.remedy}"))
        elif not self._is_lost:
            self._is_lost, self._lost_s = True, 0.0
            self._report(
                f"{self._part} does not answer. What runs goes on, but no process can start. "
                f"The cluster ends in {self._part.ends_after_s:.0f} s unless it comes back."
            )
        else:
            self._lost_s += passed_s
            if self._lost_s >= self._part.ends_after_s:
                self._on_end(
                    WorkerLostError(
                        f"{self._part} has not answered for {self._lost_s:.0f} s, and Ray would soon end the cluster's "
                        f"processes. {self._part.remedy}"
                    )
                )


async def ask_part(address: str) -> Reply:
    """Asks a process of Ray. A connection alone would not show that it is frozen."""
    host, _, port = address.rpartition(":")
    options = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
    try:
        async with asyncio.timeout(_ANSWER_S):
            _, connection = await asyncio.open_connection(host.strip("[]"), int(port))  # at once if it is dead
            connection.close()
            async with grpc.aio.insecure_channel(address, options=options) as channel:
                await channel.channel_ready()
    except ConnectionRefusedError:
        return Reply.REFUSES
    except (OSError, TimeoutError):
        return Reply.SILENT
    return Reply.ANSWERS
