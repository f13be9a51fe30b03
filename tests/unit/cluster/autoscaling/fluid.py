"""A fluid model of a cluster: prompts are work that a pool drains, answers are tokens that flow at the batch's pace.

Time is a counter. The traffic meter and the autoscaler are the real ones.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from baton.core.roles import DECODE, POOLS, PREFILL
from baton.core.slo import INTERACTIVE
from cluster.autoscaling.autoscaler import AutoscalerState, plan
from cluster.autoscaling.decode_capacity import decode_forecast
from cluster.autoscaling.demand import ClassDemand, Demand, PromptGroup
from cluster.autoscaling.forecast import fewest_workers
from cluster.autoscaling.observation import Observation, PoolCounts, PoolObservation
from cluster.autoscaling.prefill_capacity import prefill_forecast
from cluster.autoscaling.scaling_limits import ScalingLimits
from cluster.autoscaling.traffic import TrafficMeter
from tests.request_records import make_record
from tests.unit.cluster.autoscaling.scenarios import COSTS

START_S = 20.0
DRAIN_S = 10.0
SLO = INTERACTIVE


@dataclass(frozen=True)
class Load:
    """Requests per second, and their mean tokens."""

    rate: float
    prompt: float
    output: float

    def demand(self) -> Demand:
        """The exact demand, which only an oracle knows."""
        groups = tuple(PromptGroup(0.25, self.prompt * factor) for factor in (0.625, 0.875, 1.125, 1.375))
        return Demand((ClassDemand(SLO, self.rate, groups, self.output),), 10**6)


@dataclass
class Tank:
    """The workers of a pool; each costs from the order to start it until the end of its drain."""

    target: int
    ready: int
    starting: list[float] = field(default_factory=list)
    draining: list[float] = field(default_factory=list)

    @property
    def paid(self) -> int:
        return self.ready + len(self.starting) + len(self.draining)

    def scale(self, target: int, now_s: float) -> None:
        self.target = target
        while self.ready + len(self.starting) < target:
            self.starting.append(now_s + START_S)
        while self.ready + len(self.starting) > target:
            if self.starting:
                self.starting.pop()
            else:
                self.ready -= 1
                self.draining.append(now_s + DRAIN_S)

    def pass_time(self, now_s: float) -> None:
        self.ready += sum(at_s <= now_s for at_s in self.starting)
        self.starting = [at_s for at_s in self.starting if at_s > now_s]
        self.draining = [at_s for at_s in self.draining if at_s > now_s]


@dataclass(order=True)
class _Answer:
    ends_at: float
    began_s: float = field(compare=False)
    output: int = field(compare=False)
    prompt: int = field(compare=False)
    in_time: bool = field(compare=False)


class FluidCluster:
    """The simulated cluster. Call :meth:`run`, then read ``worker_s``, ``oracle_s`` and ``kept``."""

    def __init__(self, limits: ScalingLimits, sizes: dict[str, int], seed: int = 1) -> None:
        self.now_s = 0.0
        self.meter = TrafficMeter(lambda: self.now_s)
        self.tanks = {name: Tank(size, size) for name, size in sizes.items()}
        self.changes: list[tuple[float, str, int]] = []
        self.worker_s = dict.fromkeys(POOLS, 0.0)
        self.oracle_s = dict.fromkeys(POOLS, 0.0)
        self.kept: list[tuple[float, bool]] = []
        """For every finished request, its arrival and whether both targets were met."""
        self._limits = limits
        self._state = AutoscalerState()
        self._random = random.Random(seed)
        self._backlog_s = 0.0
        self._flown = 0.0
        self._answers: list[_Answer] = []
        self._oracle: dict[Load, dict[str, int]] = {}

    def run(self, seconds: float, load_at: Callable[[float], Load]) -> None:
        until_s, next_plan_s = self.now_s + seconds, self.now_s
        while self.now_s < until_s:
            load = load_at(self.now_s)
            if self.now_s >= next_plan_s:
                self._plan()
                next_plan_s += self._limits.interval_s
            for name in POOLS:
                self.tanks[name].pass_time(self.now_s)
                self.worker_s[name] += self.tanks[name].paid
                self.oracle_s[name] += self._best(load)[name]
            self._arrive(load)
            self._flow()
            self.now_s += 1.0

    def attainment(self, counts: Callable[[float], bool]) -> float:
        """The attainment of requests whose arrival satisfies ``counts``."""
        kept = [was_kept for at_s, was_kept in self.kept if counts(at_s)]
        return sum(kept) / len(kept)

    def _arrive(self, load: Load) -> None:
        ready = max(1, self.tanks[PREFILL].ready)
        last_s = 0.0
        for at_s in self._poisson(load.rate):
            self._backlog_s = max(0.0, self._backlog_s - ready * (at_s - last_s))
            last_s = at_s
            prompt = round(load.prompt * self._random.uniform(0.5, 1.5))
            output = max(2, round(self._random.expovariate(1 / load.output)))
            work_s = COSTS.prefill_ms(prompt, 0) / 1e3
            self.meter.arrived(make_record(prompt, SLO))
            self._backlog_s += work_s
            ttft_s = self._backlog_s / ready + work_s
            heapq.heappush(
                self._answers, _Answer(self._flown + output, self.now_s, output, prompt, ttft_s <= SLO.ttft_s)
            )
        self._backlog_s = max(0.0, self._backlog_s - ready * (1.0 - last_s))

    def _poisson(self, rate: float):
        at_s = self._random.expovariate(rate) if rate > 0 else 2.0
        while at_s < 1.0:
            yield at_s
            at_s += self._random.expovariate(rate)

    def _flow(self) -> None:
        per_worker = max(1, round(len(self._answers) / max(1, self.tanks[DECODE].ready)))
        self._flown += 1e3 / COSTS.tpot_ms(per_worker, 1000)
        while self._answers and self._answers[0].ends_at <= self._flown:
            answer = heapq.heappop(self._answers)
            tpot_s = (self.now_s + 1.0 - answer.began_s) / answer.output
            # Time has a resolution of one second, so the pace of shorter answers is not known.
            in_pace = tpot_s <= SLO.tpot_s + 1.0 / answer.output
            self.kept.append((answer.began_s, answer.in_time and in_pace))
            record = make_record(answer.prompt, SLO, num_output_tokens=answer.output)
            record.timeline.attributes["prefill_worker"] = "prefill-1"
            self.meter.ended(record)

    def _plan(self) -> None:
        self.meter.sample_load(PREFILL, self._backlog_s * 1e3 / COSTS.prefill_ms(1000, 0))
        self.meter.sample_load(DECODE, float(len(self._answers)))
        pools = {}
        for name, tank in self.tanks.items():
            counts = PoolCounts(tank.target, tank.ready, len(tank.starting), len(tank.draining), start_s=START_S)
            pools[name] = PoolObservation(counts, COSTS, *self.meter.load(name))
        decided = plan(
            Observation(self.now_s, self.meter.seen().demand(), pools, role_change_obstacle="no"),
            self._limits,
            self._state,
        )
        self._state = decided.state
        for name, pool in decided.pools.items():
            if pool.target != pool.before:
                self.changes.append((self.now_s, name, pool.target))
                self.tanks[name].scale(pool.target, self.now_s)

    def _best(self, load: Load) -> dict[str, int]:
        if load not in self._oracle:
            demand = load.demand()
            self._oracle[load] = {
                PREFILL: fewest_workers(lambda size: prefill_forecast(demand, COSTS, size), 1, 64).workers,
                DECODE: fewest_workers(lambda size: decode_forecast(demand, COSTS, size), 1, 64).workers,
            }
        return self._oracle[load]
