"""Runs clients, faults and cancels against one cluster, and collects what is to be judged."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import httpx

from tests.chaos.injector import Injector, Strike
from tests.chaos.load import Load
from tests.chaos.plan import Planned
from tests.chaos.resources import Growth, Holdings, MemoryWatch
from tests.chaos.streams import Stream, serve
from tests.chaos.target import RecoveryError, Target
from tests.chaos.workload import Question

_WARM_UP_SHARE = 0.2
_CANCELLED_SHARE = 0.1
"""Of the requests during faults, their clients leave at random moments."""
_IDLE_S = 60.0
_BURST = 20
_LONGEST_STAY_S = 3.0


@dataclass
class Findings:
    """What a run has found.

    Attributes:
        streams: all that have ended, of faults and of cancels.
        returns_s: after each burst of cancels, how long blocks were still in use.
        problems: what is wrong with the cluster as a whole.
        growths: of the memory of processes that lived all the time.
        watched_s: how long their memory was watched.
        excess: what there is at the end in addition to what was there at first, by name.
    """

    strikes: list[Strike] = field(default_factory=list)
    streams: list[Stream] = field(default_factory=list)
    returns_s: list[float] = field(default_factory=list)
    num_cancels: int = 0
    problems: list[str] = field(default_factory=list)
    growths: list[Growth] = field(default_factory=list)
    watched_s: float = 0.0
    excess: dict[str, int] = field(default_factory=dict)


async def run(
    target: Target,
    questions: Sequence[Question],
    plans: Mapping[str, Iterator[Planned]],
    findings: Findings,
    *,
    seed: int,
    seconds: float,
    num_clients: int,
    num_cancels: int,
) -> None:
    """Applies the plans of both pools under load, until they end or the time is over; then cancels requests."""
    running = _Run(target, questions, findings, seed)
    await running.warm_up()
    before = Holdings.of(target.pids())
    memory, stop = MemoryWatch(target.pids, target.kv_bytes, seconds * _WARM_UP_SHARE), asyncio.Event()
    watching = asyncio.create_task(memory.run(stop))
    await running.faults(plans, seconds, num_clients)
    await running.cancels(num_cancels)
    stop.set()
    await watching
    findings.growths, findings.watched_s = memory.growths(), memory.seconds
    findings.excess = Holdings.of(target.pids()).excess(before)


@dataclass(frozen=True, slots=True)
class _Run:
    """The parts of a run, on the same cluster and with the same questions."""

    target: Target
    questions: Sequence[Question]
    findings: Findings
    seed: int

    async def warm_up(self) -> None:
        """Asks each question once."""
        chance = self._chance("warm-up")
        streams = [Stream(question, question.body(chance)) for question in self.questions]
        self.findings.streams += streams
        await asyncio.gather(*(serve(self.target.http, stream) for stream in streams))
        await self._check_idle()

    async def faults(self, plans: Mapping[str, Iterator[Planned]], seconds: float, num_clients: int) -> None:
        """Applies the plans while clients send, until the plans end or the time is over."""
        load = Load(self.target.http, self.questions, self.findings.streams, self.seed, _CANCELLED_SHARE)
        injector = Injector(self.target, self.findings.strikes)
        no_load, no_faults = asyncio.Event(), asyncio.Event()
        sending = asyncio.create_task(load.run(num_clients, no_load))
        asyncio.get_running_loop().call_later(seconds, no_faults.set)
        try:
            results = await asyncio.gather(
                *(injector.run(pool, plan, no_faults) for pool, plan in plans.items()), return_exceptions=True
            )
        finally:
            no_load.set()
            await sending
        for result in results:
            if isinstance(result, RecoveryError | httpx.HTTPError):
                self.findings.problems.append(f"{type(result).__name__}: {result}")
            elif isinstance(result, BaseException):
                raise result
        await self._check_idle()

    async def cancels(self, num_cancels: int) -> None:
        """Cancels requests at random moments, in bursts, and measures how long their blocks stay in use."""
        chance, findings = self._chance("cancels"), self.findings
        while findings.num_cancels < num_cancels and not findings.problems:
            streams = [Stream(question, question.body(chance)) for question in chance.choices(self.questions, k=_BURST)]
            stays_s = [chance.uniform(0, _LONGEST_STAY_S) for _ in streams]
            await asyncio.gather(*(serve(self.target.http, *each) for each in zip(streams, stays_s, strict=True)))
            findings.streams += streams
            findings.num_cancels += sum(stream.is_cancelled for stream in streams)
            try:
                findings.returns_s.append(await self.target.until_idle(_IDLE_S))
            except TimeoutError as error:
                findings.problems.append(str(error))
        await self._check_idle()

    async def _check_idle(self) -> None:
        try:
            await self.target.until_idle(_IDLE_S)
        except TimeoutError as error:
            self.findings.problems.append(str(error))
        if num_leaked := await self.target.num_leaked_blocks():
            self.findings.problems.append(f"{num_leaked} blocks are neither free nor cached nor in use")

    def _chance(self, what: str) -> random.Random:
        return random.Random(f"{self.seed} {what}")


def connect(endpoint: str) -> httpx.AsyncClient:
    """A client of a cluster for many streams."""
    return httpx.AsyncClient(base_url=endpoint, timeout=None, limits=httpx.Limits(max_connections=None))
