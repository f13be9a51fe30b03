"""The synchronous engine: requests in, tokens out, one step at a time."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

from baton.core.drafts import ScheduledSequence
from baton.core.errors import BatonError, ContextLengthError, InternalError, InvalidRequestError, OutOfMemoryError
from baton.core.no_memory import OUT_OF_MEMORY
from baton.core.request import FinishReason, Request, TokenOutput, check_token_ids
from baton.core.steps import EngineStep
from baton.engine.contracts import Proposer, StepObserver, Verifier, VerifyResult
from baton.engine.device.device_errors import (
    DeviceLostError,
    check_device,
    free_cached_memory,
    is_device_lost,
    is_out_of_memory,
)
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.sampling.prompt_scores import queue_scores
from baton.engine.sampling.verification import ChosenTokens, PlainSampling, choose_tokens
from baton.engine.scheduling.scheduler import Scheduler
from baton.engine.scheduling.step_cost_model import StepCostModel
from baton.engine.step.overlap import AheadRule, Overlap, never
from baton.engine.step.step import Launched, Step
from baton.engine.step.step_meter import StepMeter
from baton.engine.step.trace import round_of

logger = logging.getLogger(__name__)


class Engine:
    """Runs steps over a scheduler and a model runner. Synchronous; ``loop.py`` runs it in a thread.

    Args:
        verifier: turns logits into tokens; the decode role injects one that verifies drafts.
        proposer: a speculation method; requires such a verifier.
        observers: see :meth:`subscribe`.
        max_draft_tokens: limit per request and step.
        runs_ahead: when a step may be launched before the tokens of the step before are known.
        costs: learns from the steps; a speculation method that weighs its drafts must use the same object.

    Attributes:
        last_step_ran: ``False`` when the last step found nothing that it could compute.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        verifier: Verifier | None = None,
        proposer: Proposer | None = None,
        observers: Sequence[StepObserver] = (),
        max_draft_tokens: int = 8,
        runs_ahead: AheadRule = never,
        costs: StepCostModel | None = None,
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.verifier = verifier or PlainSampling()
        self.proposer = proposer
        self._observers = list(observers)
        self.meter = StepMeter(self._observers, costs or StepCostModel())
        self._overlap = Overlap(scheduler, runs_ahead, self._launch)
        self._max_draft_tokens = max_draft_tokens
        self.last_step_ran = False

    def subscribe(self, observer: StepObserver) -> None:
        """Adds an observer of all later steps. Call it in the engine's thread, or before that starts."""
        self._observers.append(observer)

    def step(self) -> list[TokenOutput]:
        """Schedule → propose → forward → verify → post-process.

        A step that fails ends its own requests only. When the device lacks memory, torch's cached memory is freed and
        the step is retried once without drafts, unless it is booked already.

        Returns:
            New tokens of the requests that got any; empty when nothing could be scheduled.

        Raises:
            DeviceLostError: the device fails every operation, so the engine cannot continue.
        """
        follows_step = self.last_step_ran
        step = self._overlap.take() or self._schedule()
        self.last_step_ran = bool(step.plan)
        if not step.plan:
            return []
        self.meter.begin(step, follows_step=follows_step)
        try:
            return self._run(step)
        except Exception as error:  # noqa: BLE001 - whatever broke the step, its requests must end and others continue
            if step.is_booked or not is_out_of_memory(error):
                return self._fail_step(step, error)
            logger.warning("the device ran out of memory in a step, which is retried once: %s", error)
        return self._retry(step)  # outside of the handler: the exception would keep the step's tensors alive

    def _run(self, step: Step) -> list[TokenOutput]:
        launched = step.launched or self._launch(step)
        results = self._verify(step, launched)
        launched.scores.read()
        measured = self.meter.end(step, launched.batch.num_tokens, results)
        return self._post_process(step, results, measured)

    def _retry(self, step: Step) -> list[TokenOutput]:
        step.restart()
        free_cached_memory(self.runner.device)
        try:
            self._forward(step)
            return self._run(step)
        except Exception as error:  # noqa: BLE001 - as in step()
            return self._fail_step(step, error)

    def _schedule(self) -> Step:
        started_s = time.monotonic()
        return Step(self.scheduler.schedule(), started_s)

    def _launch(self, step: Step, behind: ChosenTokens | None = None) -> Launched:
        """Proposes drafts and queues the forward.

        Args:
            behind: tokens on the device from which the plan continues; with them, nothing is proposed.
        """
        for observer in self._observers:
            observer.scheduled(step.plan)
        step.scheduled_s = time.monotonic()
        if behind is None and self.proposer is not None:
            room = self.scheduler.make_draft_room(step.plan, self._max_draft_tokens)
            step.add_drafts(self.proposer.propose(step.plan, room), room)
        return self._forward(step, behind)

    def _forward(self, step: Step, behind: ChosenTokens | None = None) -> Launched:
        step.proposed_s = time.monotonic()
        batch = self.runner.build_batch(step.plan)
        if behind is not None:
            batch.take_tokens([sequence.request for sequence in behind.sequences], behind.token_ids)
        logits = self.runner.forward(batch)
        num_sampled = batch.num_rows - batch.num_prompt_rows
        step.launched = Launched(batch, logits[:num_sampled], queue_scores(batch, logits[num_sampled:]))
        return step.launched

    def _verify(self, step: Step, launched: Launched) -> dict[str, VerifyResult]:
        """Returns results by request id, for the sequences that have logits. Books the step."""
        batch, logits = launched.batch, launched.logits
        if self._can_launch_ahead(step.live_sequences()):
            chosen = choose_tokens(batch, logits)
            self._book(step, {})
            self._overlap.launch_behind(chosen)
            return _by_request(chosen.read())
        results = _by_request(self.verifier.verify(batch, logits))
        if not results:  # no token was read: wait here, to measure the step and to bound the work queued on the device
            self.runner.wait_for_device()
        self.runner.keep_accepted(batch, {request_id: result.nodes for request_id, result in results.items()})
        if self.proposer is not None:
            self.proposer.computed(batch, logits, results)
        self._book(step, results)
        return results

    def _can_launch_ahead(self, plan: Sequence[ScheduledSequence]) -> bool:
        """A grammar must know a token before it can say which may follow."""
        return all(sequence.request.grammar is None for sequence in plan) and self._overlap.can_launch_ahead(plan)

    def _book(self, step: Step, results: Mapping[str, VerifyResult]) -> None:
        step.is_booked = True
        plan = step.live_sequences()
        self.meter.booking(plan)
        for sequence in plan:
            result = results.get(sequence.request.request_id)
            self.scheduler.advance(sequence, len(result.accepted) if result else 0)
        for observer in self._observers:
            observer.computed(plan)

    def _post_process(self, step: Step, results: Mapping[str, VerifyResult], measured: EngineStep) -> list[TokenOutput]:
        for sequence in step.live_sequences():
            self.scheduler.remember(sequence.request)
        outputs: list[TokenOutput] = []
        for result in results.values():
            try:
                outputs.append(self._emit(result, measured))
            except Exception as error:  # noqa: BLE001 - the other sequences of this step have their tokens already
                outputs.extend(self._fail([result.sequence], error))
        return outputs

    def _emit(self, result: VerifyResult, measured: EngineStep) -> TokenOutput:
        """Appends a request's new tokens; drops accepted tokens behind its end."""
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
        error: BatonError | None = None
        scores, request.prompt_logprobs = request.prompt_logprobs, None
        if (reason is None and result.next_token is None) or not (scores is None or scores.is_valid):
            grammar_error = request.grammar.error if request.grammar else None
            reason = FinishReason.ERROR
            error = grammar_error or InternalError("the model produced logits that are not finite")
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
            prompt_logprobs=scores,
            round=round_of(result, kept, measured) if request.is_traced else None,
        )

    def check_request(self, request: Request) -> None:
        """Raises :class:`InvalidRequestError` for token ids outside the vocabulary or a request that cannot fit."""
        vocab_size = self.runner.loaded.vocab_size
        check_token_ids(request.prompt_token_ids, vocab_size, "prompt")
        check_token_ids(request.output_token_ids, vocab_size, "output")
        request.params.check_token_ids(vocab_size)
        if not request.prompt_token_ids:
            raise ContextLengthError("The prompt has no tokens; at least one is needed.", param="prompt")
        if len(request.output_token_ids) >= request.params.max_tokens:
            raise InvalidRequestError(
                f"The sequence has {len(request.output_token_ids)} generated tokens, but max_tokens is "
                f"{request.params.max_tokens}.",
                param="max_tokens",
            )
        self.scheduler.check_fits(request)

    def finish(self, request_id: str, reason: FinishReason) -> None:
        """Ends a request in the scheduler and the proposer; does nothing when it has ended already."""
        if self.proposer is not None:
            self.proposer.release(request_id)
        self.scheduler.finish(request_id, reason)

    def _fail_step(self, step: Step, error: Exception) -> list[TokenOutput]:
        """Ends a step's requests, or raises :class:`DeviceLostError` so that other workers can continue them."""
        self.meter.failed()
        self.raise_if_lost(error)
        return self._fail(step.live_sequences(), error)

    def raise_if_lost(self, error: Exception) -> None:
        """Raises :class:`DeviceLostError` if the device is lost, as ``error`` or a test operation shows."""
        if is_device_lost(error):
            raise DeviceLostError(f"the device is lost: {error}") from error
        try:
            check_device(self.runner.device)
        except Exception as answer:  # noqa: BLE001 - any error of the test operation counts
            if not is_out_of_memory(answer):
                raise DeviceLostError(f"the device is lost: {answer}") from error

    def _fail(self, sequences: Sequence[ScheduledSequence], error: Exception) -> list[TokenOutput]:
        """Ends the requests with an error and removes them from the scheduler and the proposer."""
        request_ids = [sequence.request.request_id for sequence in sequences]
        logger.error(
            "a step failed for %d sequences", len(sequences), exc_info=error, extra={"request_ids": request_ids}
        )
        for request_id in request_ids:
            self.finish(request_id, FinishReason.ERROR)
        return [
            TokenOutput(request_id, finish_reason=FinishReason.ERROR, error=_failure(error))
            for request_id in request_ids
        ]


def _failure(error: Exception) -> BatonError:
    """What the requests of a step end with that failed for this reason."""
    if is_out_of_memory(error):
        return OutOfMemoryError(OUT_OF_MEMORY)
    return InternalError(
        f"the engine failed while it computed this request ({type(error).__name__}); see the worker's log"
    )


def _by_request(results: Sequence[VerifyResult]) -> dict[str, VerifyResult]:
    return {r.sequence.request.request_id: r for r in results if not r.sequence.request.is_finished}
