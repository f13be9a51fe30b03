"""The engine of a simulated worker: it schedules like the real one and lets time pass instead of computing.

    wake ─▶ admit ─▶ plan a step or a leap ─▶ (time passes) ─▶ book it: chunks, tokens, ends ─▶ admit …
                                                   ▲
                                 a new request cuts the leap after the step in progress

Blocks and prefix cache are the real ones. A batch that only decodes takes all steps up to the next message or end in
one leap. Only the contexts change on the way, so its duration has a closed form.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from itertools import count

from baton.core.chunk_budget import PromptAllowance, SchedulerLimits, prompt_allowance
from baton.core.errors import BatonError
from baton.core.request import FinishReason, Request, RequestStatus
from baton.core.step_costs import Pace, StepCosts
from baton.core.steps import StepProgress
from baton.engine.kv_cache.block_manager import BlockManager
from baton.engine.scheduling.ordering import EarliestDeadlineFirst, OrderingPolicy
from baton.engine.scheduling.step_cost_model import StepCostModel
from cluster.simulation.profile import TimingProfile
from cluster.simulation.prompt_plan import PromptPlan, plan_prompts
from cluster.simulation.sequences import UNIT, SimulatedOutput, SimulatedSequence, StepsTaken
from cluster.simulation.timing import Leap, Noise, StepWork, sample_leap
from cluster.simulation.tokens import FakeTokens

_LATE_S = 0.1
"""Timers fire late in real time. A step starts at the previous one's end, unless the delay exceeds this."""
_SAMPLE_EVERY_S = 0.2
"""Interval of samples of decode-only leaps, which are enough for the latency model."""


class SimulatedEngine:
    """The engine of one worker. It belongs to an event loop, whose clock is its time.

    Args:
        costs: costs of its steps.
        tokens_per_message: largest number of tokens in one output. The outputs of a sequence grow from one token to it.
        longest_leap: largest number of steps in a leap.
        on_free: called whenever blocks are freed.
    """

    def __init__(
        self,
        profile: TimingProfile,
        costs: StepCosts,
        limits: SchedulerLimits,
        blocks: BlockManager,
        tokens: FakeTokens,
        *,
        ordering: OrderingPolicy | None = None,
        tokens_per_message: int = 16,
        longest_leap: int = 1024,
        seed: str = "",
        on_free: Callable[[], None] = lambda: None,
    ) -> None:
        self.limits = limits
        self.blocks = blocks
        self.num_steps = self.num_prefill_tokens = self.num_generated_tokens = self.num_preemptions = 0
        self.busy_s = 0.0
        self._loop = asyncio.get_running_loop()
        self.step_costs = StepCostModel(self._loop.time)
        """Learns what a real engine would; the simulated steps take the given costs."""
        self._profile = profile
        self._costs = costs
        self._tokens = tokens
        self._tokens_per_message = tokens_per_message
        self.longest_leap = longest_leap
        self._ordering = ordering or EarliestDeadlineFirst()
        self._noise = Noise(profile.noise, seed)
        self._on_free = on_free
        self._waiting: list[SimulatedSequence] = []
        self._running: dict[SimulatedSequence, None] = {}  # in order of admission
        self._computing: dict[SimulatedSequence, None] = {}
        self._num_decoding = 0
        self._progress = 0
        self._context_base = 0
        """In thousandths. The contexts of all decoding sequences sum up to this plus ``progress`` for each of them."""
        self._due: list[tuple[int, int, SimulatedSequence]] = []
        self._order = count()
        self._leap: Leap | None = None
        self._work = StepWork()
        self._aborted: list[SimulatedSequence] = []
        self._chunks: list[tuple[SimulatedSequence, int]] = []
        self._rate = (UNIT, 0.0)
        self._timer: asyncio.TimerHandle | None = None
        self._sample_due_s = 0.0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def progress(self) -> StepProgress:
        """How far the steps have come. Steps of a leap count as they pass."""
        leap = self._leap
        if leap is None:
            return StepProgress(self.num_steps)
        now_s = self._loop.time()
        num_ended = leap.steps_begun(now_s) - 1
        begun_s, end_s = leap.end_s(num_ended), leap.end_s(num_ended + 1)
        return StepProgress(self.num_steps + num_ended, max(0.0, now_s - begun_s), end_s - begun_s)

    def add(self, sequence: SimulatedSequence) -> None:
        """Queues a request that fits. If its KV was imported, it has its blocks already."""
        request = sequence.request
        sequence.stop = self._tokens.stop_length(request.params, request.num_prompt_tokens)
        self._waiting.append(sequence)
        if self._leap is None:
            self._begin(self._loop.time())
        elif len(self._running) < self._num_seats:
            self._cut()

    def abort(self, sequence: SimulatedSequence) -> None:
        """Aborts a request. Does nothing if it has finished."""
        if sequence.request.is_finished:
            return
        sequence.on_computed = None
        if sequence in self._running:
            self._aborted.append(sequence)
            self._cut()
        else:
            self._leave(sequence, FinishReason.ABORT)

    def wake(self) -> None:
        """Resumes scheduling after blocks were freed outside of this engine."""
        if self._leap is None:
            self._begin(self._loop.time())
        elif self._waiting:
            self._cut()

    def stop(self, error: BatonError) -> None:
        """Stops the engine. Readers that wait for an output get ``error``."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for sequence in (*self._running, *self._waiting):
            sequence.outputs.put_nowait(error)

    def holders(self) -> list[Request]:
        """All requests that may hold blocks."""
        return [sequence.request for sequence in (*self._running, *self._waiting)]

    @property
    def _num_seats(self) -> int:
        return min(self.limits.max_num_seqs, self.limits.chunk_tokens)

    # Start of a step or leap.

    def _begin(self, now_s: float) -> None:
        self._seat_imports(now_s)
        batch = self._num_decoding
        tokens, drafted = self._profile.rates(batch) if batch else (1.0, 0.0)
        self._rate = (round(tokens * UNIT), drafted)
        prompts = self._plan_prompts(now_s)
        if not self._running:
            self._leap = None
            if self._reclaim_import(now_s):
                self._begin(now_s)
            return
        self._chunks = prompts.chunks
        context = (self._context_base + batch * self._progress) / UNIT
        costs = self._costs
        self._work = StepWork(
            prompts.tokens, prompts.attention_pairs, batch + len(self._chunks), context, drafted * batch
        )
        num_steps = 1 if self._computing or not self._due else self._steps_to_next_message()
        factor = self._noise.factor(num_steps)
        growth_ms = costs.per_context_token * batch * self._rate[0] / UNIT
        self._leap = Leap(now_s, num_steps, factor * self._work.ms(costs), factor * growth_ms)
        self._timer = self._loop.call_at(self._leap.end_s(), self._leap_has_ended)

    def _plan_prompts(self, now_s: float) -> PromptPlan:
        waiting = self._waiting if len(self._running) < self._num_seats else ()
        if not self._computing and not waiting:
            return PromptPlan()
        return plan_prompts(
            self._computing, waiting, self._allowance(), self._ordering, now_s, lambda s: self._start(s, now_s)
        )

    def _allowance(self) -> PromptAllowance:
        """The allowance of prompts in the next step. The simulated engine knows its costs, a real one learns them."""
        batch = self._num_decoding
        targets = (s.request.tpot_target_s for s in self._running if s.is_decoding and s.request.tpot_target_s)
        context = (self._context_base + batch * self._progress) / UNIT
        pace = Pace(self._costs, self._rate[0] / UNIT, self._rate[1])
        return prompt_allowance(self.limits.chunk_tokens - batch, batch, context, min(targets, default=0.0), pace)

    def _steps_to_next_message(self) -> int:
        missing = self._due[0][0] - self._progress
        return min(self.longest_leap, max(1, -(-missing // self._rate[0])))

    def _cut(self) -> None:
        """Ends the leap after the step in progress."""
        leap = self._leap
        if leap is None or leap.num_steps == 1:
            return
        num_steps = leap.steps_begun(self._loop.time())
        if num_steps < leap.num_steps:
            leap.num_steps = num_steps
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_at(leap.end_s(), self._leap_has_ended)

    # End of a step or leap.

    def _leap_has_ended(self) -> None:
        leap = self._leap
        if leap is None:
            return
        end_s = leap.end_s()
        self.num_steps += leap.num_steps
        self.busy_s += end_s - leap.started_s
        self._sample(leap, end_s)
        self._progress += self._rate[0] * leap.num_steps
        for sequence, num_tokens in self._chunks:
            if sequence in self._computing:  # unless an earlier one has preempted it
                self._book_chunk(sequence, num_tokens, end_s)
        while self._due and self._due[0][0] <= self._progress:
            due, _, sequence = heapq.heappop(self._due)
            if sequence.is_decoding and due == sequence.progress_at(sequence.due_tokens):
                self._deliver(sequence, end_s)
        aborted, self._aborted = self._aborted, []
        for sequence in aborted:
            if not sequence.request.is_finished:
                self._leave(sequence, FinishReason.ABORT)
        now_s = self._loop.time()
        self._begin(end_s if now_s - end_s < _LATE_S else now_s)

    def _book_chunk(self, sequence: SimulatedSequence, num_tokens: int, end_s: float) -> None:
        request = sequence.request
        self.num_prefill_tokens += num_tokens
        request.num_computed_tokens += num_tokens
        self.blocks.remember(request, request.num_computed_tokens)
        if sequence.on_computed is not None:
            sequence.on_computed(request.num_computed_tokens, end_s)
        if not sequence.remaining:
            del self._computing[sequence]
            self._emit(sequence, len(request.output_token_ids) + 1, end_s)
            if not request.is_finished:
                self._start_decoding(sequence)

    def _deliver(self, sequence: SimulatedSequence, end_s: float) -> None:
        """Sends the due message of a decoding sequence."""
        request = sequence.request
        num_output = sequence.output_at(self._progress)
        self._emit(sequence, num_output, end_s)
        if request.is_finished:
            return
        request.num_computed_tokens = request.num_tokens - 1
        self.blocks.remember(request, request.num_computed_tokens)
        self._plan_message(sequence)

    def _emit(self, sequence: SimulatedSequence, num_output: int, end_s: float) -> None:
        """Sends the tokens up to ``num_output``, and ends the sequence if they are its last ones."""
        request = sequence.request
        known = len(request.output_token_ids)
        tokens = self._tokens.between(request.params, known, num_output, sequence.stop)
        request.output_token_ids += tokens
        self.num_generated_tokens += len(tokens)
        reason: FinishReason | None = None
        if num_output >= sequence.length:
            reason = FinishReason.STOP if sequence.stop is not None else FinishReason.LENGTH
        elif request.hands_off:
            reason = FinishReason.HANDED_OFF
        num_steps = self.num_steps - sequence.last_step
        accepted = max(0, len(tokens) - num_steps) if sequence.is_decoding else 0
        drafted = max(accepted, round(num_steps * self._rate[1])) if sequence.is_decoding else 0
        steps = StepsTaken(
            self.num_steps, sequence.last_s, end_s, num_steps, self._work.sequences, self._work.prompt_tokens
        )
        sequence.last_step, sequence.last_s = self.num_steps, end_s
        sequence.outputs.put_nowait(SimulatedOutput(tokens, reason, end_s, drafted, accepted, steps))
        if reason is not None:
            self._leave(sequence, reason)

    def _sample(self, leap: Leap, end_s: float) -> None:
        if not self._chunks:
            if end_s < self._sample_due_s:
                return
            self._sample_due_s = end_s + _SAMPLE_EVERY_S
        self.step_costs.measured(sample_leap(leap, self._work, self._num_decoding, self._rate[0] / UNIT))

    # Running sequences.

    def _seat_imports(self, now_s: float) -> None:
        """Starts sequences with imported KV, regardless of others that wait for blocks."""
        imported = [s for s in self._waiting if s.request.block_ids and s.remaining == 1]
        for sequence in sorted(imported, key=lambda s: self._ordering.key(s.request, now_s)):
            self._start(sequence, now_s)

    def _start(self, sequence: SimulatedSequence, now_s: float) -> bool:
        """Starts a waiting sequence, like ``Scheduler._start``. Returns False without a seat or enough blocks."""
        request = sequence.request
        if len(self._running) >= self._num_seats:
            return False
        if not self.blocks.take_all(request):
            return False
        if request.first_scheduled_s is None:
            request.first_scheduled_s = now_s
            if sequence.on_computed is not None:
                sequence.on_computed(request.num_computed_tokens, now_s)
        request.move_to(RequestStatus.RUNNING)
        self._waiting.remove(sequence)
        self._running[sequence] = None
        sequence.last_step, sequence.last_s = self.num_steps, now_s
        if sequence.remaining > 1 or not request.output_token_ids:
            self._computing[sequence] = None
        else:
            self._start_decoding(sequence)
        return True

    def _start_decoding(self, sequence: SimulatedSequence) -> None:
        sequence.is_decoding = True
        sequence.base_output, sequence.base_progress = len(sequence.request.output_token_ids), self._progress
        self._num_decoding += 1
        self._context_base += sequence.request.num_tokens * UNIT - self._progress
        sequence.message_tokens = 1
        self._plan_message(sequence)

    def _stop_decoding(self, sequence: SimulatedSequence) -> None:
        if sequence.is_decoding:
            sequence.is_decoding = False
            self._num_decoding -= 1
            known = sequence.request.num_prompt_tokens + sequence.base_output
            self._context_base -= known * UNIT - sequence.base_progress

    def _plan_message(self, sequence: SimulatedSequence) -> None:
        """Plans the next message and allocates blocks for its tokens, by preemption if necessary."""
        request = sequence.request
        known = len(request.output_token_ids)
        sequence.due_tokens = min(sequence.length, known + sequence.message_tokens)
        sequence.message_tokens = min(self._tokens_per_message, 2 * sequence.message_tokens)
        needed = request.num_prompt_tokens + sequence.due_tokens - 1
        while not self.blocks.can_grow(request, needed):
            victim = self._least_urgent()
            self._preempt(victim)
            if victim is sequence:
                return
        self.blocks.grow(request, needed)
        heapq.heappush(self._due, (sequence.progress_at(sequence.due_tokens), next(self._order), sequence))

    def _least_urgent(self) -> SimulatedSequence:
        """The least urgent running sequence; among equals, the one that started last."""
        now_s, key = self._loop.time(), self._ordering.key
        return max(((key(s.request, now_s), number, s) for number, s in enumerate(self._running)))[2]

    def _preempt(self, sequence: SimulatedSequence) -> None:
        request = sequence.request
        if sequence.is_decoding:
            known = len(request.output_token_ids)
            if (num_output := min(sequence.output_at(self._progress), sequence.length - 1)) > known:
                self._emit(sequence, num_output, self._loop.time())
        self._stop_decoding(sequence)
        del self._running[sequence]
        self._computing.pop(sequence, None)
        self.blocks.free(request)
        request.num_computed_tokens = 0
        request.move_to(RequestStatus.PREEMPTED)
        self._waiting.append(sequence)
        self.num_preemptions += 1
        self._on_free()

    def _reclaim_import(self, now_s: float) -> bool:
        """Frees imported KV of the last waiting sequence that has any, if nothing can run. Returns whether it did."""
        waiting = sorted(self._waiting, key=lambda s: self._ordering.key(s.request, now_s))
        holders = [sequence for sequence in waiting[1:] if sequence.request.block_ids]
        if not holders:
            return False
        self.blocks.free(holders[-1].request)
        holders[-1].request.num_computed_tokens = 0
        self.num_preemptions += 1
        return True

    def _leave(self, sequence: SimulatedSequence, reason: FinishReason) -> None:
        """Ends a sequence and frees its blocks. Every sequence ends here."""
        request = sequence.request
        self._stop_decoding(sequence)
        if sequence in self._running:
            del self._running[sequence]
            self._computing.pop(sequence, None)
        else:
            self._waiting.remove(sequence)
        request.move_to(RequestStatus.FINISHED)
        request.finish_reason = reason
        self.blocks.free(request)
        self._on_free()

    def fail(self, sequence: SimulatedSequence, error: BatonError) -> None:
        """Aborts a request and sends the error to its reader."""
        self.abort(sequence)
        sequence.outputs.put_nowait(error)
