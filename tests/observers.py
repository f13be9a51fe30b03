"""Observers of steps for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from baton.core.drafts import ScheduledSequence
from baton.core.step_costs import StepSample
from baton.engine.contracts import StepObserver

_Listener = Callable[[Sequence[ScheduledSequence]], object]


class CallOn(StepObserver):
    def __init__(self, scheduled: _Listener | None = None, computed: _Listener | None = None) -> None:
        self._scheduled = scheduled
        self._computed = computed

    def scheduled(self, plan: Sequence[ScheduledSequence]) -> None:
        if self._scheduled is not None:
            self._scheduled(plan)

    def computed(self, plan: Sequence[ScheduledSequence]) -> None:
        if self._computed is not None:
            self._computed(plan)


class SeenSteps(StepObserver):
    """Keeps the samples of all steps."""

    def __init__(self) -> None:
        self.samples: list[StepSample] = []

    def measured(self, sample: StepSample) -> None:
        self.samples.append(sample)
