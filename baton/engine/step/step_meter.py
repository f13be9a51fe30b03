"""Measures steps, and reports their cost to requests, observers and the cost model."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

from baton.core.drafts import ScheduledSequence
from baton.core.step_costs import StepSample
from baton.core.steps import EngineStep, StepProgress, add_share
from baton.engine.contracts import StepObserver, VerifyResult
from baton.engine.scheduling.step_cost_model import StepCostModel
from baton.engine.step.step import Step


def count_work(plan: Sequence[ScheduledSequence]) -> StepSample:
    """Work counts of a planned step, with no time and nothing accepted. Call before ``Scheduler.advance``."""
    prompt_tokens = pairs = decoding = context = drafted = 0
    for sequence in plan:
        start, count = sequence.request.num_computed_tokens, sequence.num_tokens
        if count == 1:
            decoding += 1
            context += start + 1
            drafted += len(sequence.draft)
        else:
            prompt_tokens += count
            pairs += count * start + count * (count + 1) // 2
    return StepSample(0.0, prompt_tokens, pairs, len(plan), decoding, context, drafted, 0)


class StepMeter:
    """Measures the engine's steps: begin → booking → end; or failed.

    Use only in the engine's thread, except :meth:`progress`.

    Args:
        observers: their ``measured`` gets every sample, and so does that of ``costs``.
    """

    def __init__(self, observers: Sequence[StepObserver], costs: StepCostModel) -> None:
        self._observers = observers
        self._costs = costs
        self._held: list[StepSample] | None = None
        self._num_steps = 0
        self._due_s = self._ended_s = 0.0
        self._work = count_work(())
        self._running: tuple[Step, float] | None = None

    def progress(self) -> StepProgress:
        """How far the engine has come. Any thread may call it; without a lock, since an estimate is enough."""
        num_steps, running = self._num_steps, self._running
        if running is None:
            return StepProgress(num_steps)
        step, begun_s = running
        work = count_work(list(step.plan))
        expected_ms = self._costs.pace().costs.step_ms(
            work.prompt_tokens, work.attention_pairs, work.sequences, work.context_tokens, work.drafted_tokens
        )
        return StepProgress(num_steps, max(0.0, time.monotonic() - begun_s), expected_ms / 1e3)

    def begin(self, step: Step, *, follows_step: bool) -> None:
        """Starts the measurement of a step.

        Args:
            follows_step: the engine did not sleep since the last step, so the time between them counts for this one.
        """
        self._due_s = self._ended_s if follows_step else step.started_s
        self._running = (step, self._due_s)

    def booking(self, plan: Sequence[ScheduledSequence]) -> None:
        """Counts the step's work. Call just before the scheduler advances the plan's requests."""
        self._work = count_work(plan)

    def end(self, step: Step, num_tokens: int, results: Mapping[str, VerifyResult]) -> EngineStep:
        """Adds the step to its requests' timelines and to the samples. Returns it as the timelines have it.

        Args:
            num_tokens: rows of the forward.
            results: by request id.
        """
        self._ended()
        entry = self._add_to_timelines(step, num_tokens)
        num_accepted = sum(len(result.accepted) for result in results.values())
        ms, draft_ms = (self._ended_s - self._due_s) * 1e3, (step.proposed_s - step.scheduled_s) * 1e3
        if not all(sequence.request.is_probe for sequence in step.plan):
            self._observe(self._work._replace(ms=ms, accepted_tokens=num_accepted, draft_ms=draft_ms))
        return entry

    def failed(self) -> None:
        """Ends a failed step, from which nothing learns. Call instead of :meth:`end`."""
        self._ended()

    def _ended(self) -> None:
        self._ended_s = time.monotonic()
        self._num_steps += 1
        self._running = None

    def hold(self) -> None:
        """Keeps the samples of later steps for :meth:`take` instead of reporting them."""
        self._held = []

    def take(self) -> list[StepSample]:
        """Returns the samples since :meth:`hold`, or since the last call; oldest first."""
        taken, self._held = self._held or [], []
        return taken

    def resume(self, samples: Iterable[StepSample] = ()) -> None:
        """Ends :meth:`hold`, and reports ``samples``."""
        self._held = None
        for sample in samples:
            self._observe(sample)

    def _add_to_timelines(self, step: Step, num_tokens: int) -> EngineStep:
        # A step that was launched ahead begins where the step before it ended; until then its requests waited.
        started_s = max(step.started_s, self._due_s)
        entry = EngineStep(
            self._num_steps,
            started_s,
            self._ended_s,
            self._ended_s - started_s,
            step.proposed_s - step.scheduled_s,
            len(step.plan),
            num_tokens,
            sum(sequence.num_tokens for sequence in step.plan if sequence.num_tokens > 1),
        )
        for sequence in step.live_sequences():
            request = sequence.request
            add_share(request.steps, entry, sequence.num_tokens)
            if request.first_scheduled_s is not None and step.started_s <= request.first_scheduled_s < started_s:
                request.first_scheduled_s = started_s
        return entry

    def _observe(self, sample: StepSample) -> None:
        if self._held is not None:
            self._held.append(sample)
            return
        self._costs.measured(sample)
        for observer in self._observers:
            observer.measured(sample)
