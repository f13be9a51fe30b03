"""Runs the same requests with and without speculation, alternating every few steps, and compares them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle

from baton.core.errors import ConfigError, InternalError
from baton.core.request import Request, SamplingParams
from baton.engine.engine import Engine
from benchmarks.speculation_rounds import RoundMeter, RoundTally, merged

_SEED = 1000
_STEPS_OF_A_TURN = 4
"""Few enough that a slow moment of the machine affects both runs of a pair."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One row of the benchmark's table.

    Attributes:
        workload: name of the workload.
        batch: number of concurrent sequences.
    """

    method: str
    workload: str
    temperature: float
    batch: int

    def __str__(self) -> str:
        return f"{self.method}, {self.workload}, temperature {self.temperature:g}, batch {self.batch}"


@dataclass(frozen=True, slots=True)
class RunResult:
    """The decoding of one batch of requests, measured from when all of them had their first token.

    Attributes:
        token_ids: tokens of each request, in order.
        tpots_ms: milliseconds per token of each request; ``None`` if the request ended with its first token.
        decode_ms: time until the last request was done.
        num_decode_tokens: number of tokens of all requests in that time.
    """

    token_ids: tuple[tuple[int, ...], ...]
    tpots_ms: tuple[float | None, ...]
    decode_ms: float
    num_decode_tokens: int

    @property
    def tpot_ms(self) -> float:
        """The median over the requests."""
        return _median((self,))


@dataclass(slots=True)
class CellResult:
    """The result of a cell.

    Attributes:
        plain, speculative: the runs of the cell, in pairs.
        tally: the rounds of all speculative runs.
        num_failures: how often the method has failed. A failed method is disabled, so the figures mean little then.
    """

    cell: Cell
    plain: list[RunResult] = field(default_factory=list)
    speculative: list[RunResult] = field(default_factory=list)
    tally: RoundTally = field(default_factory=RoundTally)
    num_failures: int = 0

    @property
    def plain_tpot_ms(self) -> float:
        """The median TPOT without speculation over all requests."""
        return _median(self.plain)

    @property
    def tpot_ms(self) -> float:
        """The median TPOT with speculation over all requests."""
        return _median(self.speculative)

    @property
    def speedups(self) -> list[float]:
        """For each pair of runs, the geometric mean over its requests of TPOT without speculation over TPOT with it."""
        return [_speedup(plain, speculative) for plain, speculative in zip(self.plain, self.speculative, strict=True)]

    @property
    def speedup(self) -> float:
        """The median over the pairs."""
        return statistics.median(self.speedups)

    @property
    def plain_ms_per_token(self) -> float:
        """The decoding time of all plain runs divided by the number of their tokens."""
        return _ms_per_token(self.plain)

    @property
    def ms_per_token(self) -> float:
        """The decoding time of all speculative runs divided by the number of their tokens."""
        return _ms_per_token(self.speculative)

    @property
    def num_requests(self) -> int:
        return sum(len(run.token_ids) for run in self.plain)

    @property
    def num_different(self) -> int:
        """The number of requests whose tokens differ with speculation."""
        return sum(
            one != other
            for plain, speculative in zip(self.plain, self.speculative, strict=True)
            for one, other in zip(plain.token_ids, speculative.token_ids, strict=True)
        )


def _median(runs: Sequence[RunResult]) -> float:
    return statistics.median(ms for run in runs for ms in run.tpots_ms if ms is not None)


def _speedup(plain: RunResult, speculative: RunResult) -> float:
    pairs = zip(plain.tpots_ms, speculative.tpots_ms, strict=True)
    return statistics.geometric_mean(
        without / with_it for without, with_it in pairs if without is not None and with_it is not None
    )


def _ms_per_token(runs: Sequence[RunResult]) -> float:
    return sum(run.decode_ms for run in runs) / sum(run.num_decode_tokens for run in runs)


def measure(
    cell: Cell,
    plain: Engine,
    speculative: Engine,
    meter: RoundMeter,
    batches: Sequence[Sequence[tuple[int, ...]]],
    max_tokens: int,
    eos_token_ids: frozenset[int] = frozenset(),
    *,
    is_cold: bool = False,
) -> CellResult:
    """Measures plain and speculative runs over the same requests, a pair for each of ``batches``.

    The two engines alternate every few steps; the clock of each stands still while the other computes. An uncounted
    pair with the last batch runs first, so that the method knows costs and acceptance at this size, as on a worker that
    has served for a while; not if ``is_cold``.

    Args:
        plain, speculative: engines with separate caches; the latter has ``meter`` as its proposer.
        batches: batches of prompts.
        max_tokens: maximum length of each answer.
        eos_token_ids: tokens that end an answer.
    """
    result = CellResult(cell)
    tallies: list[RoundTally] = []
    for number, prompts in enumerate(batches if is_cold else [batches[-1], *batches], start=int(is_cold)):
        requests = [list(_requests(cell, prompts, max_tokens, eos_token_ids)) for _ in range(2)]
        runs = (_Run(plain, requests[0]), _Run(speculative, requests[1], meter))
        for turn in cycle((0, 1, 1, 0)):
            runs[turn].advance(_STEPS_OF_A_TURN)
            if all(run.is_finished for run in runs):
                break
        without, with_drafts = (run.result() for run in runs)
        tally = meter.stop()
        if number and without.num_decode_tokens and with_drafts.num_decode_tokens:
            result.plain.append(without)
            result.speculative.append(with_drafts)
            tallies.append(tally)
    if not tallies:
        raise ConfigError(f"{cell}: every answer ended with its first token. Give other --prompts.")
    result.tally = merged(tallies)
    return result


def run_batch(engine: Engine, requests: Sequence[Request], meter: RoundMeter | None = None) -> RunResult:
    """Decodes requests to their end; see :class:`_Run`.

    Raises:
        InternalError: a request failed, or nothing can be scheduled.
    """
    run = _Run(engine, requests, meter)
    while not run.is_finished:
        run.advance(1)
    return run.result()


class _Run:
    """Requests that run through an engine. The clock stands still between two turns.

    Args:
        requests: added to the engine and computed until each of them has its first token.
        meter: the engine's proposer, which then begins to count and to draft.

    Raises:
        InternalError: a request failed, or nothing can be scheduled. All calls that compute may raise this.
    """

    def __init__(self, engine: Engine, requests: Sequence[Request], meter: RoundMeter | None = None) -> None:
        self._engine = engine
        self._requests = requests
        for request in requests:
            engine.scheduler.add(request)
        while not all(request.output_token_ids for request in requests):
            _step(engine)
        self._known = {request.request_id: len(request.output_token_ids) for request in requests}
        self._ms = 0.0
        self._ended_ms = dict.fromkeys(self._known, 0.0)
        if meter is not None:
            meter.start()

    @property
    def is_finished(self) -> bool:
        return not self._engine.scheduler.has_work()

    def advance(self, num_steps: int) -> None:
        """Runs ``num_steps`` steps, or fewer if the run ends."""
        for _ in range(num_steps):
            if self.is_finished:
                return
            started_s = time.perf_counter()
            progressed = _step(self._engine)
            self._ms += (time.perf_counter() - started_s) * 1e3
            self._ended_ms |= dict.fromkeys(progressed, self._ms)

    def result(self) -> RunResult:
        """The result of a finished run."""
        requests, known = self._requests, self._known
        new = {request.request_id: len(request.output_token_ids) - known[request.request_id] for request in requests}
        return RunResult(
            token_ids=tuple(tuple(request.output_token_ids) for request in requests),
            tpots_ms=tuple(self._ended_ms[name] / count if count else None for name, count in new.items()),
            decode_ms=max(self._ended_ms.values()),
            num_decode_tokens=sum(new.values()),
        )


def _step(engine: Engine) -> list[str]:
    """Runs a step; returns the ids of the requests that got tokens."""
    outputs = engine.step()
    if not engine.last_step_ran:
        raise InternalError("requests are waiting, but the engine can schedule nothing")
    for output in outputs:
        if output.error is not None:
            raise InternalError(f"a request of the benchmark failed: {output.error}")
    return [output.request_id for output in outputs]


def _requests(
    cell: Cell, prompts: Sequence[tuple[int, ...]], max_tokens: int, eos_token_ids: frozenset[int]
) -> Iterator[Request]:
    """Yields new requests, equal in every call."""
    for index, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=max_tokens, temperature=cell.temperature, seed=_SEED + index)
        yield Request(f"request-{index}", list(prompt), params, eos_token_ids, arrival_s=index)
