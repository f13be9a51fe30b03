"""Runs the sequences of one HTTP request concurrently and merges their output into one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
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


class Starts:
    """Paces the starts of sequences, for all requests with several of them."""

    def __init__(self) -> None:
        self._room = asyncio.Semaphore(_MAX_STARTING)
        self._turns = Turns(_STARTS_PER_PASS)

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

    starting = asyncio.Semaphore(_MAX_STARTING)
    started = {spec.index: asyncio.Event() for spec in specs}
    room = asyncio.Semaphore(_MAX_WAITING_DELTAS)
    # A finished task is its own end marker, so that its error arrives after its last delta.
    inbox: asyncio.Queue[tuple[int, OutputDelta] | asyncio.Task[None]] = asyncio.Queue()

    async def pump(spec: SequenceSpec) -> None:
        if spec.starts_after is not None:
            await started[spec.starts_after].wait()
        async with AsyncExitStack() as turn, aclosing(_run_one(generator, spec)) as deltas:
            await turn.enter_async_context(starting)
            await turn.enter_async_context(starts.one())
            async for delta in deltas:
                await turn.aclose()  # it has started
                await room.acquire()
                inbox.put_nowait((spec.index, delta))
                started[spec.index].set()  # now, so that what waits for it comes later in the inbox, too

    tasks = [asyncio.create_task(pump(spec)) for spec in specs]
    for task in tasks:
        task.add_done_callback(inbox.put_nowait)
    try:
        num_running = len(tasks)
        while num_running:
            item = await inbox.get()
            if isinstance(item, asyncio.Task):
                item.result()
                num_running -= 1
            else:
                room.release()
                yield item
    except Exception as error:
        # The other sequences are closed like those of a client that left, but do not count as cancelled.
        for spec in specs:
            if not spec.processor.is_finished:
                spec.request.timeline.attributes.setdefault(ENDED_BY, _code_of(error))
        raise
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


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
