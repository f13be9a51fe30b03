"""Plans the pool sizes periodically from the router's observations, and applies them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from baton.core.errors import ControllerLostError
from baton.core.roles import DECODE, POOLS, PREFILL
from cluster.autoscaling import tuning
from cluster.autoscaling.advice import advise
from cluster.autoscaling.advice_texts import advice_texts
from cluster.autoscaling.autoscaler import AutoscalerState, ScalingPlan, plan
from cluster.autoscaling.autoscaling_metrics import AutoscalerMetrics
from cluster.autoscaling.costs import ModelCosts, costs_of
from cluster.autoscaling.observation import Observation, PoolCounts, PoolObservation
from cluster.autoscaling.scaling_limits import ScalingLimits
from cluster.autoscaling.traffic import KnownTraffic, TrafficMeter
from cluster.latency.latency_model import LatencyModel
from cluster.latency.ledger import WorkLedger
from cluster.registry.workers import WorkerInfo, WorkerRegistry

logger = logging.getLogger(__name__)

T = TypeVar("T")


class PoolControl(Protocol):
    """The owner of the pools."""

    async def pool_counts(self) -> tuple[Mapping[str, PoolCounts], str]:
        """Returns (counts by pool, obstacle to role changes; empty if there is none)."""
        ...

    async def autoscale(self, targets: dict[str, int], role_change: tuple[str, str] | None) -> None:
        """Sets the sizes. ``role_change`` is (source, destination) of a worker; the targets include it."""
        ...


class Offload(Protocol):
    """Runs work of many milliseconds outside the event loop. The work must not touch shared mutable state."""

    async def __call__(self, work: Callable[[], T], /) -> T: ...


OtherTraffic = Callable[[], Awaitable[Sequence[KnownTraffic]]]


async def no_other_traffic() -> Sequence[KnownTraffic]:
    """The traffic of the other routers where there is one router."""
    return ()


class AutoscalerLoop:
    """Observes, plans and applies plans periodically.

    Args:
        num_waiting: returns the number of requests that wait in the router for room on workers.
        is_enabled: False makes plans without applying them.
        clock: monotonic seconds; sleeps follow the event loop.
        offload: runs plans and advice. A simulation runs them in place, where no time passes.
        other_traffic: the traffic of the other routers.
    """

    def __init__(
        self,
        control: PoolControl,
        registry: WorkerRegistry,
        model: LatencyModel,
        ledger: WorkLedger,
        traffic: TrafficMeter,
        limits: ScalingLimits,
        metrics: AutoscalerMetrics,
        *,
        num_waiting: Callable[[], int] = lambda: 0,
        is_enabled: bool = True,
        clock: Callable[[], float] = time.monotonic,
        offload: Offload = asyncio.to_thread,
        other_traffic: OtherTraffic = no_other_traffic,
    ) -> None:
        self._control = control
        self._registry = registry
        self._model = model
        self._ledger = ledger
        self._traffic = traffic
        self._limits = limits
        self._metrics = metrics
        self._num_waiting = num_waiting
        self._is_enabled = is_enabled
        self._clock = clock
        self._offload = offload
        self._other_traffic = other_traffic
        self._state = AutoscalerState()

    async def run(self) -> None:
        """Samples the load and plans until cancelled."""
        due_s = self._clock() + self._limits.interval_s
        while True:
            await asyncio.sleep(min(tuning.LOAD_SAMPLE_S, self._limits.interval_s))
            self.sample()
            if self._clock() < due_s:
                continue
            due_s += self._limits.interval_s
            if due_s <= self._clock():  # it was delayed; missed plans are skipped
                due_s = self._clock() + self._limits.interval_s
            try:
                await self.step()
            except ControllerLostError as error:
                logger.warning("no plan: %s", error.message)
            except Exception:  # pools keep their sizes, and requests go on
                logger.exception("a plan failed; the next one starts from scratch")

    async def step(self) -> ScalingPlan:
        """Makes one plan, and applies it if the autoscaler is enabled."""
        decided = await self._plan(await self.observe())
        self._metrics.observe(decided)
        if self._is_enabled and decided.changes:
            await self._apply(decided)
        self._state = decided.state  # only now, since applying the changes may fail
        return decided

    async def _apply(self, decided: ScalingPlan) -> None:
        for pool in decided.pools.values():
            if pool.target != pool.before:
                logger.info("%s", pool.texts[0])
        change = decided.role_change
        role_change = None if change is None else (change.source, change.destination)
        await self._control.autoscale({name: pool.target for name, pool in decided.pools.items()}, role_change)
        self._metrics.applied(decided)

    async def look(self) -> dict[str, Any]:
        """The plan of the next step for ``GET /admin/plan``, without applying it; JSON-ready."""
        observation = await self.observe()
        decided = await self._plan(observation)
        return {
            "enabled": self._is_enabled,
            **decided.to_dict(),
            "move_obstacle": observation.role_change_obstacle,
            "traffic": await self._offload((await self._all_traffic()).seen.summary),
            "limits": {name: {"min": bounds.min, "max": bounds.max} for name, bounds in self._limits.pools.items()},
        }

    async def advise(self) -> dict[str, Any]:
        """Advice on a better use of the workers for ``GET /admin/advise``; JSON-ready."""
        counts, _ = await self._control.pool_counts()
        costs, seen = self._costs(), (await self._all_traffic()).seen
        sizes = {name: max(1, counts[name].target) for name in POOLS}
        advice = await self._offload(lambda: advise(seen.mix(), costs, sizes))
        traffic = await self._offload(seen.summary)
        return {**advice.to_dict(), "texts": advice_texts(advice), "traffic": traffic}

    async def observe(self) -> Observation:
        """An immutable snapshot of all inputs of a plan."""
        counts, obstacle = await self._control.pool_counts()
        costs, known = self._costs(), await self._all_traffic()
        pools = {name: PoolObservation(counts[name], costs.get(name), *self._traffic.load(name)) for name in POOLS}
        demand = await self._offload(known.seen.demand)
        return Observation(self._clock(), demand, pools, known.num_waiting, obstacle)

    def own_traffic(self) -> KnownTraffic:
        """The traffic of this router alone."""
        return KnownTraffic(self._traffic.seen(), self._num_waiting())

    async def _all_traffic(self) -> KnownTraffic:
        known = self.own_traffic()
        for other in await self._other_traffic():
            known = known.joined(other)
        return known

    def sample(self) -> None:
        """Samples the load of both pools. Sequences whose prompts are not computed yet do not count as decoding."""
        prompts, sequences = dict.fromkeys(POOLS, 0), 0
        for worker in self._registry.workers:
            worker_id = worker.info.worker_id
            prompts[worker.info.pool] += self._ledger.num_prompts(worker_id)
            sequences += self._ledger.batch(worker_id)[0]
        self._traffic.sample_load(PREFILL, prompts[PREFILL])
        self._traffic.sample_load(DECODE, max(0, sequences - sum(prompts.values())))

    async def _plan(self, observation: Observation) -> ScalingPlan:
        limits, state = self._limits, self._state
        return await self._offload(lambda: plan(observation, limits, state))

    def _costs(self) -> dict[str, ModelCosts]:
        """A snapshot of the costs by pool."""
        costs = costs_of(self._model, self._infos(PREFILL), self._infos(DECODE))
        names = [own.info.worker_id for own in costs.values()]
        return {pool: replace(own, model=self._model.snapshot(names, own.link)) for pool, own in costs.items()}

    def _infos(self, pool: str) -> list[WorkerInfo]:
        return [worker.info for worker in self._registry.pool(pool) if not worker.draining]
