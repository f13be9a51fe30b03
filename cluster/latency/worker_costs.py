"""The step costs of workers as they report them, and the mean of each kind of worker for those that just started.

a worker's costs = (weight · costs of its kind + samples · reported costs) / (weight + samples)
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from baton.core.cost_fit import UNKNOWN_SD
from baton.core.speculation_rates import SpeculationRates
from baton.core.step_costs import STEP_PRIOR, StepCostReport, StepCosts
from cluster.latency.estimates import WorkerTraits

logger = logging.getLogger(__name__)

_KIND_WEIGHT = 4.0
"""Weight of the kind's costs, in samples. A worker reports about 50 after its profile."""
_NEWEST_SHARE = 0.2
"""Share of a new report in the costs of its kind, so that one odd worker among several does not set them."""


class _Kind:
    """Workers of one pool, model, dtype, device and number of threads.

    Args:
        prior: coefficients of an earlier run, above zero; empty if there are none.

    Attributes:
        is_known: the costs are measured, in this run or an earlier one.
        has_reports: they are measured in this run.
    """

    def __init__(self, prior: Sequence[float]) -> None:
        self.costs = StepCosts(*(prior or STEP_PRIOR))
        self.rates = SpeculationRates()
        self.is_known = bool(prior)
        self.has_reports = False

    def learn(self, report: StepCostReport) -> None:
        self.costs = _mixed(self.costs, report.costs, _NEWEST_SHARE if self.is_known else 1.0)
        self.rates = self.rates.moved_to(report.rates, _NEWEST_SHARE)
        self.is_known = self.has_reports = True


@dataclass(frozen=True, slots=True)
class WorkerCost:
    """What is known of a worker.

    Attributes:
        report: its last report, blended with the costs of its kind; ``None`` before the first one.
    """

    traits: WorkerTraits
    kind: _Kind
    report: StepCostReport | None = None

    @property
    def costs(self) -> StepCosts:
        return self.kind.costs if self.report is None else self.report.costs

    @property
    def sd(self) -> float:
        """Standard deviation of a single step, relative to the prediction."""
        return UNKNOWN_SD if self.report is None else self.report.sd

    @property
    def num_samples(self) -> int:
        return 0 if self.report is None else self.report.num_samples

    def rates(self, batch: int) -> tuple[float, float]:
        """As :meth:`SpeculationRates.rates`, with the kind's rates where the worker has few."""
        of_kind = self.kind.rates.rates(batch)
        return of_kind if self.report is None else self.report.rates.rates(batch, of_kind)


class WorkerCosts:
    """The costs of all workers."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, ...], _Kind] = {}
        self._workers: dict[str, WorkerCost] = {}
        self._unknown = WorkerCost(WorkerTraits(("unknown",), 512), _Kind(()))

    def __contains__(self, worker_id: str) -> bool:
        return worker_id in self._workers

    def __getitem__(self, worker_id: str) -> WorkerCost:
        """A worker that was never added gets the prior's costs."""
        return self._workers.get(worker_id, self._unknown)

    def add(self, worker_id: str, traits: WorkerTraits, prior: Sequence[float] = ()) -> None:
        """Adds a worker. Idempotent.

        Args:
            prior: coefficients of an earlier run, above zero, for the first worker of its kind.
        """
        if worker_id not in self._workers:
            kind = self._kinds.setdefault(traits.kind, _Kind(prior))
            self._workers[worker_id] = WorkerCost(traits, kind)

    def remove(self, worker_id: str) -> None:
        """Removes a worker. The costs of its kind are kept."""
        self._workers.pop(worker_id, None)

    def update(self, worker_id: str, report: StepCostReport) -> None:
        """Takes a worker's report. Ignores those without new samples, of unknown workers, and impossible ones."""
        worker = self._workers.get(worker_id)
        if worker is None or report.num_samples == worker.num_samples:
            return
        if not report.is_plausible():
            logger.debug("a worker reported impossible step costs: %s", report, extra={"worker": worker_id})
            return
        kind, share = worker.kind, 1.0
        if kind.is_known:
            share = report.num_samples / (report.num_samples + _KIND_WEIGHT)
        blended = report._replace(costs=_mixed(kind.costs, report.costs, share))
        kind.learn(report)
        self._workers[worker_id] = WorkerCost(worker.traits, kind, blended)

    def coefficients(self, kind: tuple[str, ...]) -> tuple[float, ...] | None:
        """Coefficients of a kind, as :meth:`add` takes them; ``None`` if none of its workers has reported."""
        found = self._kinds.get(kind)
        return tuple(found.costs) if found is not None and found.has_reports else None

    def snapshot(self, worker_ids: Iterable[str]) -> WorkerCosts:
        """An independent copy of the present state of some workers."""
        taken = WorkerCosts()
        for worker_id in worker_ids:
            if (worker := self._workers.get(worker_id)) is not None:
                taken._workers[worker_id] = WorkerCost(worker.traits, copy.copy(worker.kind), worker.report)
        return taken


def _mixed(old: StepCosts, new: StepCosts, share: float) -> StepCosts:
    return StepCosts(*(before + share * (after - before) for before, after in zip(old, new, strict=True)))
