"""Passes what steps cost to everything that learns from it, or keeps it back to be judged first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from baton.core.step_samples import StepSample, StepSamples
from baton.engine.contracts import Proposer

SampleListener = Callable[[StepSample], None]


class ForwardCost(NamedTuple):
    """What :meth:`baton.engine.contracts.Proposer.observe_step` is called with."""

    num_sequences: int
    num_tokens: int
    ms: float


class MeasuredStep(NamedTuple):
    """One step, as it is learned from.

    Attributes:
        forward: of its forward and sampling alone, without drafting.
    """

    sample: StepSample
    forward: ForwardCost


class StepMeter:
    """Belongs to the engine's thread.

    Args:
        listeners: called with every sample.
        proposer: learns what forwards cost.

    Attributes:
        samples: of the last steps.
    """

    def __init__(self, listeners: Sequence[SampleListener], proposer: Proposer | None) -> None:
        self.samples = StepSamples()
        self._listeners = listeners
        self._proposer = proposer
        self._held: list[MeasuredStep] | None = None
        self._forward = ForwardCost(0, 0, 0.0)

    def observe_forward(self, forward: ForwardCost) -> None:
        """Call it when a step's tokens are read, before :meth:`observe` for the same step."""
        self._forward = forward
        if self._held is None and self._proposer is not None:
            self._proposer.observe_step(*forward)

    def observe(self, sample: StepSample) -> None:
        """Call it at the end of a step."""
        if self._held is not None:
            self._held.append(MeasuredStep(sample, self._forward))
            return
        self.samples.add(sample)
        for listener in self._listeners:
            listener(sample)

    def hold(self) -> None:
        """From now on nothing learns from steps; :meth:`take` returns them."""
        self._held = []

    def take(self) -> list[MeasuredStep]:
        """The steps since :meth:`hold`, or since the last call; oldest first."""
        taken, self._held = self._held or [], []
        return taken

    def resume(self, steps: Iterable[MeasuredStep] = ()) -> None:
        """Ends :meth:`hold`, and has everything learn from ``steps``."""
        self._held = None
        for step in steps:
            self.observe_forward(step.forward)
            self.observe(step.sample)
