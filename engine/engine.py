"""The engine: requests in, tokens out, one step at a time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from engine.errors import InternalError
from engine.model_runner import ModelRunner
from engine.request import FinishReason, TokenOutput
from engine.scheduler import ScheduledSequence, Scheduler
from engine.step_cost_fit import StepCostFit
from engine.step_samples import StepSamples
from engine.step_sampling import sample_step
from engine.steps import EngineStep, add_share
from engine.verification import PlainSampling, Proposer, Verifier, VerifyResult

logger = logging.getLogger(__name__)

StepListener = Callable[[Sequence[ScheduledSequence]], None]


class Engine:
    """Synchronous; ``loop.py`` gives it a thread.

    Args:
        verifier: turns logits into tokens; the decode role injects one that knows drafts.
        proposer: a speculation method; needs such a verifier.
        on_scheduled: called with each step's plan before it runs.
        on_computed: called with it after the forward, before requests finish: KV of the plan is in the cache.
        costs: learns what steps cost; the scheduler reads it.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        verifier: Verifier | None = None,
        proposer: Proposer | None = None,
        on_scheduled: Sequence[StepListener] = (),
        on_computed: Sequence[StepListener] = (),
        max_draft_tokens: int = 8,
        costs: StepCostFit | None = None,
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.samples = StepSamples()
        """What the last steps cost."""
        self._costs = costs
        self.verifier = verifier or PlainSampling()
        self.proposer = proposer
        self._max_draft_tokens = max_draft_tokens
        self._on_scheduled = on_scheduled
        self._on_computed = on_computed
        self._num_steps = 0
        self._last_ended_s = 0.0
        self.last_step_ran = False
        """False when the last step found nothing that it could compute."""

    def step(self) -> list[TokenOutput]:
        """Schedule → propose → build batch → forward → verify → post-process.

        Returns:
            New tokens of the requests that got any; empty when nothing could be scheduled.
        """
        started_s = time.monotonic()
        # After a step that ran, nothing sleeps: what lies between two such steps is part of what a step costs.
        due_s = self._last_ended_s if self.last_step_ran else started_s
        plan = self.scheduler.schedule()
        self.last_step_ran = bool(plan)
        if not plan:
            return []
        try:
            return self._run(plan, started_s, due_s)
        except Exception as error:  # noqa: BLE001 - whatever broke the step, its requests must end and others go on
            self._last_ended_s = time.monotonic()
            return self._fail(plan, error)

    def _run(self, plan: list[ScheduledSequence], started_s: float, due_s: float) -> list[TokenOutput]:
        for listener in self._on_scheduled:
            listener(plan)
        scheduled_s = time.monotonic()
        plan = self._propose(plan)
        proposed_s = time.monotonic()
        batch = self.runner.build_batch(plan)
        logits = self.runner.forward(batch)
        results = {result.sequence.request.request_id: result for result in self.verifier.verify(batch, logits)}
        if not results:  # nothing was read: what a step costs would be unknown, and steps would pile up on the device
            self.runner.wait_for_device()
        self.runner.keep_accepted(batch, {request_id: result.nodes for request_id, result in results.items()})
        if self.proposer is not None:
            self.proposer.observe_step(len(plan), batch.num_tokens, (time.monotonic() - proposed_s) * 1e3)
            self.proposer.computed(batch, logits, results)
        self._note_step(plan, batch.num_tokens, started_s, proposed_s - scheduled_s)
        num_accepted = sum(len(result.accepted) for result in results.values())
        sample = sample_step(plan, num_accepted, (self._last_ended_s - due_s) * 1e3)
        self.samples.add(sample)
        if self._costs is not None:
            self._costs.observe(sample)
        return self._post_process(plan, results)

    def _note_step(self, plan: list[ScheduledSequence], num_tokens: int, started_s: float, draft_s: float) -> None:
        """Every request of the plan remembers the step, for its timeline."""
        self._num_steps += 1
        ended_s = self._last_ended_s = time.monotonic()
        num_prompt_tokens = sum(sequence.num_tokens for sequence in plan if sequence.num_tokens > 1)
        step = EngineStep(
            self._num_steps, started_s, ended_s, ended_s - started_s, draft_s, len(plan), num_tokens, num_prompt_tokens
        )
        for sequence in plan:
            add_share(sequence.request.steps, step, sequence.num_tokens)

    def _post_process(self, plan: list[ScheduledSequence], results: dict[str, VerifyResult]) -> list[TokenOutput]:
        for sequence in plan:
            result = results.get(sequence.request.request_id)
            self.scheduler.advance(sequence, len(result.accepted) if result else 0)
        for listener in self._on_computed:
            listener(plan)
        outputs: list[TokenOutput] = []
        for result in results.values():
            try:
                outputs.append(self._emit(result))
            except Exception as error:  # noqa: BLE001 - the others of this step have their tokens already
                outputs.extend(self._fail([result.sequence], error))
        return outputs

    def _propose(self, plan: list[ScheduledSequence]) -> list[ScheduledSequence]:
        if self.proposer is None:
            return plan
        room = self.scheduler.make_draft_room(plan, self._max_draft_tokens)
        drafts = self.proposer.propose(plan, room)
        if not drafts:
            return plan
        return [
            ScheduledSequence(sequence.request, sequence.num_tokens, draft.first(limit))
            if (limit := room.get(sequence.request.request_id, 0))
            and (draft := drafts.get(sequence.request.request_id)) is not None
            else sequence
            for sequence in plan
        ]

    def _emit(self, result: VerifyResult) -> TokenOutput:
        """Appends a request's new tokens; whatever was accepted behind its end is dropped."""
        request = result.sequence.request
        if self.proposer is not None:
            self.proposer.observe(result)
        kept: list[int] = []
        reason: FinishReason | None = None
        for token in result.token_ids:
            kept.append(token)
            reason = request.append_output(token)
            if reason is not None:
                break
        steps, request.steps = tuple(request.steps), []
        error = None
        if reason is None and result.next_token is None:
            reason, error = FinishReason.ERROR, "the model produced logits that are not numbers"
            self.scheduler.blocks.forget(request)
        if reason is None and request.hands_off:
            reason = FinishReason.HANDED_OFF
        if reason is not None:
            self.finish(request.request_id, reason)
        return TokenOutput(
            request_id=request.request_id,
            token_ids=tuple(kept),
            logprobs=result.logprobs[: len(kept)] if result.logprobs else None,
            finish_reason=reason,
            num_cached_tokens=request.num_cached_tokens,
            num_drafted=result.num_drafted,
            num_accepted=min(len(result.accepted), len(kept)),
            drafted_by=result.sequence.draft.method,
            error=error,
            steps=steps,
        )

    def finish(self, request_id: str, reason: FinishReason) -> None:
        """Ends a request for scheduler and proposer alike; harmless when it is gone already."""
        if self.proposer is not None:
            self.proposer.release(request_id)
        self.scheduler.finish(request_id, reason)

    def _fail(self, sequences: Sequence[ScheduledSequence], error: Exception) -> list[TokenOutput]:
        """Ends them all; whatever is left of them in scheduler or proposer, nobody waits for them any longer."""
        request_ids = [sequence.request.request_id for sequence in sequences]
        logger.error(
            "a step failed for %d sequences", len(sequences), exc_info=error, extra={"request_ids": request_ids}
        )
        failure = InternalError(
            f"the engine failed while it computed this request ({type(error).__name__}); the worker's log says more"
        )
        for request_id in request_ids:
            self.finish(request_id, FinishReason.ERROR)
        return [
            TokenOutput(request_id, finish_reason=FinishReason.ERROR, error=failure.message)
            for request_id in request_ids
        ]
