"""Faults that happen to one worker: its process is killed or stopped, or its host's network is cut or slow."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial

import psutil

from baton.core.roles import POOLS
from tests.chaos.target import Target
from tests.namespaces import Host

_ONE_IN_FIVE = ("-m", "statistic", "--mode", "random", "--probability", "0.2")


@dataclass(frozen=True)
class Victim:
    """The worker to which a fault happens.

    Attributes:
        target: its cluster.
        process: its main process.
        host: its host; ``None`` if it shares this machine's network.
        partner: the host of a worker of the other pool.
    """

    target: Target
    pool: str
    process: psutil.Process
    host: Host | None = None
    partner: Host | None = None


@dataclass(frozen=True)
class Fault:
    """A kind of fault.

    Attributes:
        name: for people.
        kind: the group under which it is counted.
        strike: makes it happen, and returns when it is over; at once if it lasts forever.
        replaces: whether the worker must be replaced afterwards; otherwise it may be.
        silences: whether nothing comes from the worker meanwhile, so that it must be noticed soon.
        is_of_host: whether it happens to the worker's host, and so to all workers on it.
        concerns_both: whether it happens to workers of both pools.
    """

    name: str
    kind: str
    strike: Callable[[Victim], Awaitable[None]]
    replaces: bool = False
    silences: bool = True
    is_of_host: bool = False
    concerns_both: bool = False


async def _kill(victim: Victim) -> None:
    victim.process.kill()


async def _freeze_forever(victim: Victim) -> None:
    victim.process.suspend()


async def _freeze(seconds: float, victim: Victim) -> None:
    victim.process.suspend()
    with suppress(psutil.TimeoutExpired):  # unless it is replaced and ends meanwhile
        await asyncio.to_thread(victim.process.wait, seconds)
    with suppress(psutil.NoSuchProcess):
        victim.process.resume()


async def _scale(victim: Victim) -> None:
    """The pool gets another worker, and loses one when that is ready."""
    for size in (victim.target.size + 1, victim.target.size):
        await victim.target.scale(victim.pool, size)


async def _jump(seconds: int, victim: Victim) -> None:
    """The worker's clock jumps, and ten seconds later back."""
    if victim.target.clocks is None:
        raise ValueError("the clocks of this cluster cannot be set")
    for jump_s in (seconds, 0):
        victim.target.clocks.jump(victim.process.pid, jump_s)
        await asyncio.sleep(10.0)


async def _no_memory(victim: Victim) -> None:
    """The worker gets no more memory for a while."""
    with suppress(psutil.NoSuchProcess, ProcessLookupError):
        soft, hard = victim.process.rlimit(psutil.RLIMIT_AS)
        victim.process.rlimit(psutil.RLIMIT_AS, (victim.process.memory_info().vms, hard))
        await asyncio.sleep(5.0)
        victim.process.rlimit(psutil.RLIMIT_AS, (soft, hard))


async def lose_controller(target: Target, strike: Callable[[psutil.Process], None] = psutil.Process.kill) -> None:
    """Kills or stops the controller of a complete cluster, and waits until `baton up` has started another one.

    Raises:
        RecoveryError: the cluster is not complete, or has no controller, in time.
    """
    for pool in POOLS:
        await target.until_complete(pool)
    [controller] = [process for process in map(psutil.Process, target.pids()) if _is_controller(process)]
    strike(controller)
    await asyncio.to_thread(controller.wait)
    await target.workers()


async def _lose_controller(strike: Callable[[psutil.Process], None], victim: Victim) -> None:
    await lose_controller(victim.target, strike)


def _is_controller(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline()).startswith("ray::Controller")
    return False


async def _link(begin: Callable[[Host, Host], AbstractContextManager[None]], seconds: float, victim: Victim) -> None:
    """Something is wrong with the network of the victim's host, or with its link to the partner."""
    if victim.host is None or victim.partner is None:
        raise ValueError("the worker has no host of its own")
    with begin(victim.host, victim.partner):
        await asyncio.sleep(seconds)


def _cut(host: Host, _: Host) -> AbstractContextManager[None]:
    return host.disconnected()


def _lost(host: Host, _: Host) -> AbstractContextManager[None]:
    return host.dropping()


def _lossy(host: Host, _: Host) -> AbstractContextManager[None]:
    return host.dropping(*_ONE_IN_FIVE)


def _slow(host: Host, _: Host) -> AbstractContextManager[None]:
    return host.slowed("10mbit")


@contextmanager
def _no_link(host: Host, partner: Host) -> Iterator[None]:
    with host.dropping("-d", partner.address), partner.dropping("-d", host.address):
        yield


KILL = Fault("kill", "kills", _kill, replaces=True)
KILLS: Sequence[Fault] = (KILL,)
FREEZES: Sequence[Fault] = (
    Fault("freeze for 5 s", "freezes", partial(_freeze, 5.0)),
    Fault("freeze for 40 s", "freezes", partial(_freeze, 40.0)),
    Fault("freeze forever", "freezes", _freeze_forever, replaces=True),
)
_on_links = partial(Fault, kind="link faults", is_of_host=True)
LINK_FAULTS: Sequence[Fault] = (
    _on_links("cut for 2 s", strike=partial(_link, _cut, 2.0)),
    _on_links("cut for 6 s", strike=partial(_link, _cut, 6.0)),
    _on_links("cut for 30 s", strike=partial(_link, _cut, 30.0)),
    _on_links("answers lost for 6 s", strike=partial(_link, _lost, 6.0)),
    _on_links("no link to a peer for 10 s", strike=partial(_link, _no_link, 10.0), silences=False, concerns_both=True),
    _on_links("20 % lost for 10 s", strike=partial(_link, _lossy, 10.0), silences=False),
    _on_links("10 Mbit/s for 15 s", strike=partial(_link, _slow, 15.0), silences=False),
)
_on_hosts = partial(Fault, kind="host faults", silences=False)
HOST_FAULTS: Sequence[Fault] = (
    _on_hosts("clock 5 h ahead for 10 s", strike=partial(_jump, 18000)),
    _on_hosts("clock 5 h behind for 10 s", strike=partial(_jump, -18000)),
    _on_hosts("no memory for 5 s", strike=_no_memory),
)
_on_controller = partial(Fault, kind="control faults", silences=False, concerns_both=True)
CONTROL_FAULTS: Sequence[Fault] = (
    _on_controller("controller killed", strike=partial(_lose_controller, psutil.Process.kill)),
    _on_controller("controller stopped", strike=partial(_lose_controller, psutil.Process.suspend)),
)
SCALINGS: Sequence[Fault] = (Fault("scaling", "scalings", _scale, silences=False),)
