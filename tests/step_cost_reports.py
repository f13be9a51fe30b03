"""What workers would report of given steps."""

from __future__ import annotations

from collections.abc import Iterable

from baton.core.step_costs import StepCostReport, StepSample
from baton.engine.scheduling.step_cost_model import StepCostModel


def report_of(samples: Iterable[StepSample]) -> StepCostReport:
    """The report of a worker after these steps, while no time passes."""
    costs = StepCostModel(lambda: 0.0)
    for sample in samples:
        costs.measured(sample)
    return costs.report()
