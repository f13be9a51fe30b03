"""The engine for asyncio: one stream of outputs per request, and one wake-up of the event loop per step."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from baton.core.chunk_budget import SchedulerLimits
from baton.core.drafts import ScheduledSequence
from baton.core.errors import (
    InternalError,
    RequestCancelledError,
    UnsupportedParameterError,
    WorkerLostError,
)
from baton.core.request import FinishReason, Request, SamplingParams, TokenOutput
from baton.core.step_costs import StepCostReport, StepSample
from baton.core.steps import StepProgress
from baton.engine.contracts import Proposer, StepObserver, Verifier
from baton.engine.device.device_errors import check_device
from baton.engine.engine import Engine
from baton.engine.kv_cache.block_manager import BlockManager
from baton.engine.kv_cache.block_pool import BlockUsage
from baton.engine.loop import EngineLoop
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.scheduling.ordering import OrderingPolicy
from baton.engine.scheduling.scheduler import Scheduler
from baton.engine.scheduling.step_cost_model import StepCostModel
from baton.engine.step.overlap import AheadRule, never
from baton.grammar.compiler import GrammarCompiler

T = TypeVar("T")
_Stream = asyncio.Queue[TokenOutput | WorkerLostError]
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since start, and the current state."""

    num_running: int
    num_waiting: int
    blocks: BlockUsage
    num_leaked_blocks: int
    num_preemptions: int
    num_steps: int
    num_prefill_tokens: int
    num_generated_tokens: int
    step_costs: StepCostReport


class _StepCounters(StepObserver):
    def __init__(self) -> None:
        self.num_steps = 0
        self.num_prefill_tokens = 0

    def scheduled(self, plan: Sequence[ScheduledSequence]) -> None:
        self.num_steps += 1
        for sequence in plan:
            start = sequence.request.num_computed_tokens
            prompt = sequence.request.num_prompt_tokens
            self.num_prefill_tokens += max(0, min(start + sequence.num_tokens, prompt) - start)


class AsyncEngine:
    """Owns an :class:`Engine` and its thread.

    Args:
        hash_key: of the cluster's block hashes; see :class:`BlockManager`.
        ordering: order of waiting requests; first come, first served by default.
        verifier: turns logits into tokens; the decode role passes one that verifies drafts.
        proposer: a speculation method, or ``None``; drafts at most ``max_draft_tokens`` per request and step.
        runs_ahead: when a step may be launched before the tokens of the step before are known.
        costs: as in :class:`Engine`.
        grammars: compiles those of requests; without it, requests with a grammar are refused.

    Attributes:
        closed: set when the engine has ended.
        block_holders: called in the engine's thread by the leak check; each returns block lists that are held by
            something other than a request or a lease.
    """

    def __init__(
        self,
        runner: ModelRunner,
        limits: SchedulerLimits,
        *,
        prefix_caching: bool = True,
        hash_key: bytes = b"",
        ordering: OrderingPolicy | None = None,
        verifier: Verifier | None = None,
        proposer: Proposer | None = None,
        max_draft_tokens: int = 8,
        num_threads: int | None = None,
        niceness: int = 0,
        runs_ahead: AheadRule = never,
        costs: StepCostModel | None = None,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self.runner = runner
        self._grammars = grammars
        self.blocks = BlockManager(
            runner.cache.num_blocks, runner.spec.block_size, prefix_caching=prefix_caching, hash_key=hash_key
        )
        self._costs = costs or StepCostModel()
        self.scheduler = Scheduler(limits, self.blocks, ordering, self._costs.pace)
        self._counters = _StepCounters()
        self.block_holders: list[Callable[[], Iterable[Sequence[int]]]] = []
        self._engine = Engine(
            runner,
            self.scheduler,
            verifier,
            proposer,
            (self._counters,),
            max_draft_tokens,
            runs_ahead,
            self._costs,
        )
        self._thread = EngineLoop(
            self._engine, self._deliver, self._check_blocks, num_threads, self._on_closed, niceness
        )
        self.closed = asyncio.Event()
        self._streams: dict[str, _Stream] = {}  # by request id; engine's thread
        self._loop: asyncio.AbstractEventLoop | None = None
        self._freed = asyncio.Event()
        self._ending = "this worker's engine failed"
        self._num_leaked_blocks = 0
        self._num_generated_tokens = 0
        self._num_probes = itertools.count(1)

    def subscribe(self, observer: StepObserver) -> None:
        """Adds an observer of all steps. Call it before :meth:`start`."""
        self._engine.subscribe(observer)

    def start(self) -> None:
        """Starts the thread. Call it inside the event loop that will consume the streams."""
        self._loop = asyncio.get_running_loop()
        self.runner.cache.on_copy_error = self._copy_failed
        self._thread.start()

    async def stop(self) -> None:
        """Ends the thread; open streams end with :class:`WorkerLostError`."""
        self._ending = "this worker is shutting down"
        await asyncio.to_thread(self._thread.stop)
        self._end_streams()

    def _copy_failed(self, error: Exception) -> None:
        """Ends the engine if the device is lost; a step may never notice. Any thread may call it."""

        def look() -> None:
            raise error

        self.post(look)

    async def call(self, function: Callable[[], T]) -> T:
        """Runs ``function`` in the engine's thread, between two steps: the only way to touch scheduler and blocks.

        A step may still run on the device; :meth:`PagedKVCache.mark` orders copies of KV after it.
        """
        return await self._thread.call(function)

    def post(self, function: Callable[[], object]) -> None:
        """Like :meth:`call`, without waiting."""
        self._thread.submit(function)

    def check_request(self, request: Request) -> None:
        """Calls :meth:`Engine.check_request`. Any thread may call it."""
        self._engine.check_request(request)

    async def generate(
        self, request: Request, adopt: Callable[[Request], None] | None = None
    ) -> AsyncGenerator[TokenOutput]:
        """Streams a request's tokens until it finishes. Closing the iterator aborts it.

        Args:
            adopt: called in the engine's thread once the request is added; gives it blocks that hold its KV already.

        Raises:
            InvalidRequestError: the request can never run.
            InternalError: the engine failed on it, also for lack of memory, or its id is in use.
            RequestCancelledError: another caller aborted it.
            WorkerLostError: the engine was stopped.
        """
        self.check_request(request)
        if request.params.grammar:
            await self._attach_grammar(request)
        stream: _Stream = asyncio.Queue()
        finished = False
        try:
            await self.call(lambda: self._add(request, stream, adopt))
            while not finished:
                output = await stream.get()
                if isinstance(output, WorkerLostError):
                    raise output
                finished = output.finish_reason is not None
                if output.finish_reason is FinishReason.ERROR:
                    raise output.error or InternalError("the engine failed on this request")
                if output.finish_reason is FinishReason.ABORT:
                    raise RequestCancelledError(f"request {request.request_id} was aborted")
                yield output
        finally:
            if not finished:
                self.post(lambda: self._abort(request))

    async def _attach_grammar(self, request: Request) -> None:
        """Compiles a request's grammar, and brings it behind the request's output tokens."""
        if self._grammars is None:
            raise UnsupportedParameterError("This engine supports no grammars and schemas.")
        compile_grammar, output = self._grammars.compile, request.output_token_ids
        request.grammar = await asyncio.to_thread(compile_grammar, request.params.grammar, output)

    def notify_freed_threadsafe(self) -> None:
        """Like :meth:`notify_freed`, from the engine's thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.notify_freed)

    def progress(self) -> StepProgress:
        """How far the steps have come; does not wait for the engine's thread. Any thread may call it.

        Raises:
            WorkerLostError: the engine has ended.
        """
        if self._thread.is_closed:
            raise WorkerLostError(self._ending)
        return self._engine.meter.progress()

    async def probe(self) -> None:
        """Computes one token, which proves that the thread and the device work.

        An engine with requests is only asked for a small operation on its device: if they wait for KV blocks, so would
        the token, and if they run, the steps are the proof.

        Raises:
            BatonError: the engine failed.
        """
        if await self.call(self.scheduler.has_work):
            await self.call(lambda: check_device(self.runner.device))
            return
        await generate_all(
            self,
            Request(
                f"probe-{next(self._num_probes)}",
                prompt_token_ids=[0],
                params=SamplingParams(max_tokens=1, temperature=0, ignore_eos=True),
                speculation_method="none",
                is_probe=True,
            ),
        )

    async def stats(self) -> EngineStats:
        return await self.call(self._stats)

    @asynccontextmanager
    async def unrecorded(self) -> AsyncIterator[list[StepSample]]:
        """Runs requests without traces: no cached prefix, nothing counted, nothing learned.

        Only for an engine that serves nothing else meanwhile. :meth:`take_steps` returns what the steps inside cost.

        Yields:
            A list. The engine learns from the samples in it when the block ends without an error.
        """
        prefix_caching = await self.call(self._begin_unrecorded)
        learned: list[StepSample] = []
        try:
            yield learned
        except BaseException:
            learned.clear()
            raise
        finally:
            await self.call(lambda: self._end_unrecorded(learned, prefix_caching=prefix_caching))

    async def take_steps(self) -> list[StepSample]:
        """Inside :meth:`unrecorded`: returns the samples since it began, or since the last call."""
        return await self.call(self._engine.meter.take)

    def _begin_unrecorded(self) -> bool:
        """Returns whether prefix caching was on. Engine's thread."""
        self._engine.meter.hold()
        was_caching, self.blocks.prefix_caching = self.blocks.prefix_caching, False
        return was_caching

    def _end_unrecorded(self, learned: Sequence[StepSample], *, prefix_caching: bool) -> None:
        """Reverses :meth:`_begin_unrecorded`. Engine's thread."""
        self._engine.meter.resume(learned)
        self.blocks.prefix_caching = prefix_caching
        self._counters.num_steps = self._counters.num_prefill_tokens = self._num_generated_tokens = 0
        self.scheduler.num_preemptions = 0

    @property
    def blocks_freed(self) -> asyncio.Event:
        """An event, set when a request's blocks return to the pool. Get it before checking whether there is room."""
        return self._freed

    def _add(self, request: Request, stream: _Stream, adopt: Callable[[Request], None] | None) -> None:
        """Adds a request and its stream. Engine's thread."""
        if self.scheduler.get(request.request_id) is not None:
            raise InternalError(f"request id {request.request_id} is in use on this worker")
        self.scheduler.add(request)
        # Outputs look their stream up in this thread too, so that none reaches a later request with the same id.
        self._streams[request.request_id] = stream
        if adopt is not None:
            adopt(request)

    def _abort(self, request: Request) -> None:
        """Aborts a request. Ignores one that has finished, and another one with the same id. Engine's thread."""
        if self.scheduler.get(request.request_id) is request:
            self._engine.finish(request.request_id, FinishReason.ABORT)
            self._deliver([TokenOutput(request.request_id, finish_reason=FinishReason.ABORT)])

    def _stats(self) -> EngineStats:
        return EngineStats(
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting,
            blocks=self.blocks.usage(),
            num_leaked_blocks=self._num_leaked_blocks,
            num_preemptions=self.scheduler.num_preemptions,
            num_steps=self._counters.num_steps,
            num_prefill_tokens=self._counters.num_prefill_tokens,
            num_generated_tokens=self._num_generated_tokens,
            step_costs=self._costs.report(),
        )

    def _on_closed(self) -> None:
        """Ends all streams when the thread ends, even by a fault, so that no caller waits for it. Engine's thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._end_streams)

    def _end_streams(self) -> None:
        while self._streams:
            self._streams.popitem()[1].put_nowait(WorkerLostError(self._ending))
        self.closed.set()

    def _deliver(self, outputs: Sequence[TokenOutput]) -> None:
        """Sends all of a step's outputs with one wake-up of the event loop. Engine's thread."""
        self._num_generated_tokens += sum(len(output.token_ids) for output in outputs)
        deliveries = []
        for output in outputs:
            over = output.finish_reason is not None
            stream = self._streams.pop(output.request_id, None) if over else self._streams.get(output.request_id)
            if stream is not None:
                deliveries.append((stream, output))
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._dispatch, deliveries)

    def _dispatch(self, deliveries: Sequence[tuple[_Stream, TokenOutput]]) -> None:
        for stream, output in deliveries:
            stream.put_nowait(output)
        if any(output.finish_reason is not None for _, output in deliveries):
            self.notify_freed()

    def notify_freed(self) -> None:
        """Wakes all tasks that wait for blocks. Event loop only."""
        # Each notification gets a fresh event, so that no waiter can clear one that another has not seen yet.
        freed, self._freed = self._freed, asyncio.Event()
        freed.set()

    def _check_blocks(self) -> None:
        """Checks, while idle, that every block is free, cached, leased or reserved. Engine's thread."""
        held: list[Sequence[int]] = [request.block_ids for request in self.scheduler.requests]
        for holder in self.block_holders:
            held.extend(holder())
        problems = self.blocks.pool.check(held)
        if problems:
            self._num_leaked_blocks = max(self._num_leaked_blocks, len(problems))
            logger.error("KV block accounting is wrong: %s", "; ".join(problems[:5]))


async def generate_all(engine: AsyncEngine, request: Request) -> list[int]:
    """Returns all tokens of a request at once, for tests and aggregated runs."""
    tokens: list[int] = []
    async with aclosing(engine.generate(request)) as outputs:
        async for output in outputs:
            tokens.extend(output.token_ids)
    return tokens
