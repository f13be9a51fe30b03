"""Runs the sequences of one HTTP request concurrently and merges their output into one stream."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass

from baton.core.errors import BatonError, InternalError
from baton.core.outcomes import ENDED_BY
from baton.core.request import FinishReason
from baton.core.timeline import Event
from cluster.gateway.output_processor import OutputDelta, OutputProcessor
from cluster.gateway.turns import Turns
from cluster.requests.generation import GenerationRequest, Generator, TokenChunk

# Deltas that wait for a slow client. Beyond that, the sequences wait.
_MAX_WAITING_DELTAS = 256
_MAX_STARTING = 32
"""Sequences of requests with several that may wait for their first token, of one request and of all together; further
ones wait, so that others can start, and so that first tokens do not come in crowds."""
_STARTS_PER_PASS = 4
_MAX_RUNNING = 256
"""Sequences of requests with several that may run at a time, shared evenly among these requests, so that neither their
tokens nor their ends come in crowds."""
_LEAST_RUNNING = 8
"""Each of these requests may run so many, however many requests there are."""
_ENDS_PER_PASS = 8


class Starts:
    """Paces the starts of sequences, for all requests with several of them."""

    def __init__(self) -> None:
        self._room = asyncio.Semaphore(_MAX_STARTING)
        self._turns = Turns(_STARTS_PER_PASS)
        self._num_requests = 0

    @contextmanager
    def request(self) -> Iterator[None]:
        """Counts a request with several sequences while it is in progress."""
        self._num_requests += 1
        try:
            yield
        finally:
            self._num_requests -= 1

    @property
    def max_running(self) -> int:
        """How many sequences each of these requests may run now."""
        return max(_LEAST_RUNNING, _MAX_RUNNING // max(1, self._num_requests))

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """Waits until a sequence may start; leave the context when it has."""
        async with self._room:
            await self._turns.wait()
            yield


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """One sequence to run.

    Attributes:
        index: the choice's index in the response.
        starts_after: index of the sequence whose first token this one waits for, so that the prefix cache holds their
            common prompt by then.
    """

    index: int
    request: GenerationRequest
    processor: OutputProcessor
    starts_after: int | None = None


async def run_sequences(
    generator: Generator, specs: Sequence[SequenceSpec], starts: Starts
) -> AsyncGenerator[tuple[int, OutputDelta], None]:
    """Yields ``(index, delta)`` as they arrive; deltas of one index are in order.

    Closing the iterator, or the failure of one sequence, closes the generators of all.

    Args:
        starts: what all requests share; a single sequence starts at once.

    Raises:
        BatonError: the error of the first sequence that failed.
    """
    if len(specs) == 1:
        async with aclosing(_run_one(generator, specs[0])) as deltas:
            async for delta in deltas:
                yield specs[0].index, delta
        return

    with starts.request():
        merged = _MergedSequences(generator, specs, starts)
        try:
            async with aclosing(merged.deltas()) as deltas:
                async for item in deltas:
                    yield item
        except Exception as error:
            # The other sequences are closed like those of a client that left, but do not count as cancelled.
            for spec in specs:
                if not spec.processor.is_finished:
                    spec.request.timeline.attributes.setdefault(ENDED_BY, _code_of(error))
            raise
        finally:
            await merged.close()


class _MergedSequences:
    """The sequences of one request, of which a bounded number has a task."""

    def __init__(self, generator: Generator, specs: Sequence[SequenceSpec], starts: Starts) -> None:
        self._generator = generator
        self._starts = starts
        # First those that others wait for, which then seldom have to wait.
        self._waiting = deque(sorted(specs, key=lambda spec: spec.starts_after is not None))
        self._first_tokens = {spec.starts_after: asyncio.Event() for spec in specs if spec.starts_after is not None}
        self._starting: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._room = asyncio.Semaphore(_MAX_WAITING_DELTAS)
        # A finished task is its own end marker, so that its error arrives after its last delta.
        self._inbox: asyncio.Queue[tuple[int, OutputDelta] | asyncio.Task[None]] = asyncio.Queue()

    async def deltas(self) -> AsyncGenerator[tuple[int, OutputDelta], None]:
        """Starts the sequences one after the other; as :func:`run_sequences`."""
        self._start_some()
        while self._tasks:
            item = await self._inbox.get()
            if isinstance(item, asyncio.Task):
                self._tasks.discard(item)
                item.result()
            else:
                self._room.release()
                self._starting.discard(item[0])
                yield item
            self._start_some()

    async def close(self) -> None:
        """Ends the running sequences, a few in each pass of the event loop, and waits for their ends."""
        left = list(self._tasks)
        try:
            while left:
                for task in left[:_ENDS_PER_PASS]:
                    task.cancel()
                del left[:_ENDS_PER_PASS]
                await asyncio.sleep(0)
        finally:
            for task in left:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start_some(self) -> None:
        while self._waiting and len(self._starting) < _MAX_STARTING and len(self._tasks) < self._starts.max_running:
            spec = self._waiting.popleft()
            self._starting.add(spec.index)
            task = asyncio.create_task(self._run(spec))
            task.add_done_callback(self._inbox.put_nowait)
            self._tasks.add(task)

    async def _run(self, spec: SequenceSpec) -> None:
        if spec.starts_after is not None:
            await self._first_tokens[spec.starts_after].wait()
        first_token = self._first_tokens.get(spec.index)
        async with AsyncExitStack() as turn, aclosing(_run_one(self._generator, spec)) as deltas:
            await turn.enter_async_context(self._starts.one())
            async for delta in deltas:
                await turn.aclose()  # it has started
                await self._room.acquire()
                self._inbox.put_nowait((spec.index, delta))
                if first_token is not None:
                    first_token.set()  # now, so that what waits for it comes later in the inbox, too


async def _run_one(generator: Generator, spec: SequenceSpec) -> AsyncGenerator[OutputDelta, None]:
    chunks = generator.generate(spec.request)
    try:
        async for chunk in chunks:
            delta = spec.processor.process(chunk)
            if spec.processor.is_finished:
                spec.request.timeline.record(Event.DETOKENIZED)
                if chunk.finish_reason is None:
                    # A stop string ended it. The generator does not know, and closing it cancels the rest.
                    spec.request.timeline.attributes[ENDED_BY] = str(FinishReason.STOP)
            yield delta
            if spec.processor.is_finished and chunk.finish_reason is None:
                return
        if not spec.processor.is_finished:
            raise InternalError("A sequence ended without a finish reason.")
    except Exception as error:
        spec.request.timeline.attributes.setdefault(ENDED_BY, _code_of(error))
        raise
    finally:
        await _close(chunks)


def _code_of(error: Exception) -> str:
    return error.code if isinstance(error, BatonError) else InternalError.code


async def _close(chunks: AsyncIterator[TokenChunk]) -> None:
    aclose = getattr(chunks, "aclose", None)
    if aclose is not None:
        await aclose()
