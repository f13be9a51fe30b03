"""Faults that happen to one worker: its process is killed or stopped, or its host's network is cut or slow."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

import psutil

from baton.core.roles import POOLS
from tests.namespaces import Host

FOR_EVER = float("inf")
_ONE_IN_FIVE = ("-m", "statistic", "--mode", "random", "--probability", "0.2")


@dataclass(frozen=True)
class Victim:
    """The worker to which a fault happens.

    Attributes:
        process: its main process.
        host: its host; ``None`` if it shares this machine's network.
        partner: the host of a worker of the other pool.
    """

    process: psutil.Process
    host: Host | None = None
    partner: Host | None = None


class Fault(Protocol):
    """A kind of fault.

    Attributes:
        name: for people.
        kind: the group under which it is counted.
        needs_hosts: whether each worker must have a host of its own.
        replaces: whether the worker must be replaced afterwards; otherwise it may be.
        pools: those that must be complete before, when it happens to a worker of ``pool``.
    """

    name: str
    kind: str
    needs_hosts: bool
    replaces: bool

    def pools(self, pool: str) -> Sequence[str]: ...

    async def strike(self, victim: Victim) -> None:
        """Makes it happen, and returns when it is over; at once if it lasts for ever."""
        ...


@dataclass(frozen=True)
class Kill:
    name: str = "kill"
    kind: str = "kills"
    needs_hosts: bool = False
    replaces: bool = True

    def pools(self, pool: str) -> Sequence[str]:
        return (pool,)

    async def strike(self, victim: Victim) -> None:
        victim.process.kill()


@dataclass(frozen=True)
class Freeze:
    """The process is stopped for some seconds."""

    seconds: float
    kind: str = "freezes"
    needs_hosts: bool = False

    @property
    def name(self) -> str:
        return f"freeze for {'ever' if self.replaces else f'{self.seconds:g} s'}"

    @property
    def replaces(self) -> bool:
        return self.seconds == FOR_EVER

    def pools(self, pool: str) -> Sequence[str]:
        return (pool,)

    async def strike(self, victim: Victim) -> None:
        victim.process.suspend()
        if not self.replaces:
            await asyncio.sleep(self.seconds)
            with suppress(psutil.NoSuchProcess):  # it was replaced
                victim.process.resume()


@dataclass(frozen=True)
class LinkFault:
    """The network of the worker's host has a fault for some seconds.

    Attributes:
        begin: makes the fault, for the host and the partner's; leaving its context mends it.
        between: whether it concerns the link to the partner alone, and so the workers of both pools.
    """

    name: str
    seconds: float
    begin: Callable[[Host, Host], AbstractContextManager[None]]
    between: bool = False
    kind: str = "link faults"
    needs_hosts: bool = True
    replaces: bool = False

    def pools(self, pool: str) -> Sequence[str]:
        return POOLS if self.between else (pool,)

    async def strike(self, victim: Victim) -> None:
        if victim.host is None or victim.partner is None:
            raise ValueError("the worker has no host of its own")
        with self.begin(victim.host, victim.partner):
            await asyncio.sleep(self.seconds)


@contextmanager
def _no_link(host: Host, partner: Host) -> Iterator[None]:
    with host.dropping("-d", partner.address), partner.dropping("-d", host.address):
        yield


KILLS: Sequence[Fault] = (Kill(),)
FREEZES: Sequence[Fault] = (Freeze(5.0), Freeze(40.0), Freeze(FOR_EVER))
LINK_FAULTS: Sequence[Fault] = (
    LinkFault("cut for 2 s", 2.0, lambda host, _: host.disconnected()),
    LinkFault("cut for 6 s", 6.0, lambda host, _: host.disconnected()),
    LinkFault("cut for 30 s", 30.0, lambda host, _: host.disconnected()),
    LinkFault("answers lost for 6 s", 6.0, lambda host, _: host.dropping()),
    LinkFault("no link to a peer for 10 s", 10.0, _no_link, between=True),
    LinkFault("20 % lost for 10 s", 10.0, lambda host, _: host.dropping(*_ONE_IN_FIVE)),
    LinkFault("10 Mbit/s for 15 s", 15.0, lambda host, _: host.slowed("10mbit")),
)
