"""The engine: requests in, tokens out, one step at a time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from baton.core.drafts import ScheduledSequence
from baton.core.errors import InternalError
from baton.core.request import FinishReason, Request, TokenOutput
from baton.core.steps import EngineStep, add_share
from baton.engine.batch.batch import ForwardBatch
from baton.engine.contracts import Proposer, Verifier, VerifyResult
from baton.engine.device.device_errors import (
    DeviceLostError,
    check_device,
    free_cached_memory,
    is_device_lost,
    is_out_of_memory,
)
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.sampling.step_sampling import sample_step
from baton.engine.sampling.verification import ChosenTokens, PlainSampling, choose_tokens
from baton.engine.scheduling.scheduler import Scheduler
from baton.engine.scheduling.step_meter import ForwardCost, SampleListener, StepMeter

logger = logging.getLogger(__name__)

StepListener = Callable[[Sequence[ScheduledSequence]], None]
AheadRule = Callable[[Sequence[ScheduledSequence]], bool]
"""Whether the step behind this plan may be launched before the plan's tokens are known: no draft needs them."""

_UNREAD = 0  # stands for a token that is on the device alone


def never(plan: Sequence[ScheduledSequence]) -> bool:
    """An :data:`AheadRule`: every step is scheduled when the tokens before it are known."""
    return False


def always(plan: Sequence[ScheduledSequence]) -> bool:
    """An :data:`AheadRule` for an engine without drafts."""
    return True


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step whose forward is queued on the device.

    Attributes:
        started_s, scheduled_s, proposed_s: when its scheduling began, and when plan and drafts were there.
    """

    plan: list[ScheduledSequence]
    batch: ForwardBatch
    logits: torch.Tensor
    started_s: float
    scheduled_s: float
    proposed_s: float


class Engine:
    """Synchronous; ``loop.py`` gives it a thread.

        step k          forward ─ tokens ──────────────── read ─ emit
        step k + 1               schedule ─ forward              tokens ─ …

    Where ``runs_ahead`` allows it, the step behind the one whose tokens are due is on the device when they are read, so
    that the device never waits for the host. What turns out to have ended is in that step for nothing.

    Args:
        verifier: turns logits into tokens; the decode role injects one that knows drafts.
        proposer: a speculation method; needs such a verifier.
        on_scheduled: called with each step's plan before it runs.
        on_computed: called with it after the forward, before requests finish: KV of the plan is in the cache, or on a
            GPU will be when it has come to this point of the stream.
        on_measured: called with what each step cost.
        runs_ahead: asked in each step.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        verifier: Verifier | None = None,
        proposer: Proposer | None = None,
        on_scheduled: Sequence[StepListener] = (),
        on_computed: Sequence[StepListener] = (),
        on_measured: Sequence[SampleListener] = (),
        max_draft_tokens: int = 8,
        runs_ahead: AheadRule = never,
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.meter = StepMeter(on_measured, proposer)
        self.samples = self.meter.samples
        """What the last steps cost."""
        self.verifier = verifier or PlainSampling()
        self.proposer = proposer
        self._max_draft_tokens = max_draft_tokens
        self._on_scheduled = on_scheduled
        self._on_computed = on_computed
        self._runs_ahead = runs_ahead
        self._ahead: _Launched | None = None
        self._is_booked = False
        self._num_steps = 0
        self._last_ended_s = 0.0
        self.last_step_ran = False
        """False when the last step found nothing that it could compute."""

    def step(self) -> list[TokenOutput]:
        """Schedule → propose → build batch → forward → verify → post-process.

        A step that fails ends its requests and no others. When the device lacks memory, torch's cached memory is freed
        and the step is tried once more, without drafts; but for an overlapped step whose tokens can no longer be read,
        since the step after it is queued already.

        Returns:
            New tokens of the requests that got any; empty when nothing could be scheduled.

        Raises:
            DeviceLostError: the device computes nothing any more, so the engine is of no more use.
        """
        started_s = time.monotonic()
        # After a step that ran, nothing sleeps: what lies between two such steps is part of what a step costs.
        due_s = self._last_ended_s if self.last_step_ran else started_s
        launched, self._ahead = self._ahead, None
        plan = _living(launched.plan) if launched is not None else []
        if not plan:  # nothing was launched, or all that was has ended since
            launched, plan = None, self.scheduler.schedule()
        self.last_step_ran = bool(plan)
        if not plan:
            return []
        self._is_booked = False
        try:
            return self._complete(launched or self._launch(plan, started_s), due_s)
        except Exception as error:  # noqa: BLE001 - whatever broke the step, its requests must end and others go on
            if self._is_booked or not is_out_of_memory(error):
                return self._fail_step(plan, error)
            logger.warning("the device lacks memory for a step; it is tried once more: %s", error)
        launched = None  # like the exception, it held the failed step's tensors
        free_cached_memory(self.runner.device)
        try:
            return self._complete(self._forward(_living(plan), started_s), due_s)
        except Exception as error:  # noqa: BLE001 - as above
            return self._fail_step(plan, error)

    def _launch(self, plan: list[ScheduledSequence], started_s: float, behind: ChosenTokens | None = None) -> _Launched:
        """
        Args:
            behind: tokens that the plan goes on from, which have not been read yet.
        """
        for listener in self._on_scheduled:
            listener(plan)
        scheduled_s = time.monotonic()
        if behind is None:
            plan = self._propose(plan)
        return self._forward(plan, started_s, scheduled_s, behind)

    def _forward(
        self,
        plan: list[ScheduledSequence],
        started_s: float,
        scheduled_s: float | None = None,
        behind: ChosenTokens | None = None,
    ) -> _Launched:
        """Queues a planned step's forward. Without ``scheduled_s``, planning took no time of its own."""
        proposed_s = time.monotonic()
        batch = self.runner.build_batch(plan)
        if behind is not None:
            batch.take_tokens([sequence.request for sequence in behind.sequences], behind.token_ids)
        logits = self.runner.forward(batch)
        return _Launched(plan, batch, logits, started_s, proposed_s if scheduled_s is None else scheduled_s, proposed_s)

    def _complete(self, step: _Launched, due_s: float) -> list[TokenOutput]:
        """From the logits to what requests get."""
        plan = _living(step.plan)
        sample = sample_step(plan)
        if self._runs_ahead(plan):
            chosen = choose_tokens(step.batch, step.logits)
            self._book(plan, {})
            self._launch_ahead(chosen)
            results = _by_request(chosen.read())
            self._tell_cost(step)
        else:
            results = self._verify(step)
            self._book(plan, results)
        self._note_step(step, plan, due_s)
        num_accepted = sum(len(result.accepted) for result in results.values())
        sample = sample._replace(ms=(self._last_ended_s - due_s) * 1e3, accepted_tokens=num_accepted)
        self.meter.observe(sample)
        return self._post_process(plan, results)

    def _verify(self, step: _Launched) -> dict[str, VerifyResult]:
        batch = step.batch
        results = _by_request(self.verifier.verify(batch, step.logits))
        if not results:  # nothing was read: what a step costs would be unknown, and steps would pile up on the device
            self.runner.wait_for_device()
        self.runner.keep_accepted(batch, {request_id: result.nodes for request_id, result in results.items()})
        self._tell_cost(step)
        if self.proposer is not None:
            self.proposer.computed(batch, step.logits, results)
        return results

    def _tell_cost(self, step: _Launched) -> None:
        """Of a step whose tokens have just been read."""
        ms = (time.monotonic() - max(step.proposed_s, self._last_ended_s)) * 1e3
        self.meter.observe_forward(ForwardCost(len(step.plan), step.batch.num_tokens, ms))

    def _book(self, plan: Sequence[ScheduledSequence], results: Mapping[str, VerifyResult]) -> None:
        self._is_booked = True
        for sequence in plan:
            result = results.get(sequence.request.request_id)
            self.scheduler.advance(sequence, len(result.accepted) if result else 0)
        for listener in self._on_computed:
            listener(plan)

    def _launch_ahead(self, chosen: ChosenTokens) -> None:
        """Launches the step behind the one that is booked, with its tokens as they are on the device.

        One that cannot be launched is tried again when these tokens are read, and fails then, if it must.
        """
        requests = [sequence.request for sequence in _living(chosen.sequences)]
        for request in requests:
            request.output_token_ids.append(_UNREAD)
        started_s = time.monotonic()
        plan: list[ScheduledSequence] = []
        try:
            plan = self.scheduler.schedule_ahead({r.request_id for r in requests if _ends_with_next_token(r)})
            if plan:
                self._ahead = self._launch(plan, started_s, chosen)
        except Exception as error:
            if is_device_lost(error):
                raise
            request_ids = [sequence.request.request_id for sequence in plan]
            logger.warning(
                "a step could not be launched ahead of its tokens", exc_info=True, extra={"request_ids": request_ids}
            )
        finally:
            for request in requests:
                request.output_token_ids.pop()

    def _note_step(self, step: _Launched, plan: Sequence[ScheduledSequence], due_s: float) -> None:
        """Every request of the plan remembers the step, for its timeline."""
        self._num_steps += 1
        # One that was launched ahead has begun where the step before it ended; until then its requests have waited.
        started_s = max(step.started_s, due_s)
        ended_s = self._last_ended_s = time.monotonic()
        num_prompt_tokens = sum(sequence.num_tokens for sequence in step.plan if sequence.num_tokens > 1)
        noted = EngineStep(
            self._num_steps,
            started_s,
            ended_s,
            ended_s - started_s,
            step.proposed_s - step.scheduled_s,
            len(step.plan),
            step.batch.num_tokens,
            num_prompt_tokens,
        )
        for sequence in plan:
            request = sequence.request
            add_share(request.steps, noted, sequence.num_tokens)
            if request.first_scheduled_s is not None and step.started_s <= request.first_scheduled_s < started_s:
                request.first_scheduled_s = started_s

    def _post_process(
        self, plan: Sequence[ScheduledSequence], results: Mapping[str, VerifyResult]
    ) -> list[TokenOutput]:
        for sequence in _living(plan):
            self.scheduler.remember(sequence.request)
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

    def _fail_step(self, plan: Sequence[ScheduledSequence], error: Exception) -> list[TokenOutput]:
        """Ends a step's requests, or raises :class:`DeviceLostError` so that they can go on elsewhere."""
        self._last_ended_s = time.monotonic()
        self.raise_if_lost(error)
        return self._fail(_living(plan), error)

    def raise_if_lost(self, error: Exception) -> None:
        """Raises :class:`DeviceLostError` if an error, wherever it occurred, comes from a device that is lost."""
        if is_device_lost(error):
            raise DeviceLostError(f"the device is lost: {error}") from error
        try:
            check_device(self.runner.device)
        except Exception as answer:  # noqa: BLE001 - whatever the device answers, it is an answer
            if not is_out_of_memory(answer):
                raise DeviceLostError(f"the device is lost: {answer}") from error

    def _fail(self, sequences: Sequence[ScheduledSequence], error: Exception) -> list[TokenOutput]:
        """Ends the requests with an error and removes them from the scheduler and the proposer."""
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


def _living(plan: Sequence[ScheduledSequence]) -> list[ScheduledSequence]:
    """Those whose request has not ended while the step was on the device."""
    return [sequence for sequence in plan if not sequence.request.is_finished]


def _by_request(results: Sequence[VerifyResult]) -> dict[str, VerifyResult]:
    return {r.sequence.request.request_id: r for r in results if not r.sequence.request.is_finished}


def _ends_with_next_token(request: Request) -> bool:
    """Whatever the token is that its last place stands for."""
    return request.hands_off or len(request.output_token_ids) >= request.params.max_tokens
