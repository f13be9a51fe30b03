"""The sending side of the hand-off. KV is sent while prefill still runs: each step's new KV after that step.

    engine's thread   scheduled ──▶    started        computed ──▶    lease the new blocks, queue the range
    event loop        reserve at the peer … read a range, cut it into parts, send … commit … release the leases

Leases, not requests, keep the source blocks: a request may be preempted or finish while its KV is still on the way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass, field

from baton.core.drafts import ScheduledSequence
from baton.core.errors import TransferError
from baton.core.request import Request
from baton.core.step_costs import StepSample
from baton.core.timeline import Event, TransferPart
from baton.engine.async_engine import AsyncEngine
from baton.engine.contracts import StepObserver
from baton.engine.kv_cache.kv_copies import WorkMark
from baton.engine.kv_cache.paged_cache import PagedKVCache
from baton.kv_transfer.base import KVSendStream, KVTransport, PartBuffer, PartHeader, TransferOffer, plan_parts
from prefill_worker.encoding_choice import EncodingChoice, Passage
from prefill_worker.part_log import PartLog
from prefill_worker.read_ahead import read_parts


class ComputedStep:
    """A launched step. The device reaches ``mark`` when the step is done; ``None`` means that it is done already."""

    def __init__(self, cache: PagedKVCache) -> None:
        self._cache = cache
        self.mark: WorkMark | None = cache.mark()
        self._waiting: asyncio.Future[None] | None = None

    async def done(self) -> None:
        """Waits for the step. All prompts of the step share one waiting thread."""
        if self.mark is None:
            return
        if self._waiting is None:
            self._waiting = asyncio.get_running_loop().run_in_executor(None, self._cache.wait, self.mark)
        await asyncio.shield(self._waiting)


@dataclass(frozen=True, slots=True)
class ComputedRange:
    """Computed positions ``[start, end)``, and the blocks of positions ``[0, end)``."""

    start: int
    end: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ExportSummary:
    """The sizes and times of a finished transfer.

    Attributes:
        num_tokens: tokens whose KV was sent.
        num_cached_tokens: tokens whose KV the receiver held already.
        seconds: from asking for room to the acknowledgement.
        parts: when the parts were read, sent and acknowledged.
        num_shared_bytes: bytes, of ``num_bytes``, that the receiver read from this process's memory.
        num_spared_bytes: bytes saved compared with native KV.
    """

    num_bytes: int
    num_parts: int
    num_tokens: int
    num_cached_tokens: int
    seconds: float
    parts: tuple[TransferPart, ...] = ()
    num_shared_bytes: int = 0
    num_spared_bytes: int = 0


@dataclass(slots=True, eq=False)
class Export:
    """One transfer in progress. ``leased_until``, ``lease_ids`` and ``closed`` belong to the engine's thread, which
    sets ``draft_state`` before it queues the last range."""

    transfer_id: str
    peer: str
    request: Request
    events: dict[Event, float]
    started: asyncio.Event = field(default_factory=asyncio.Event)
    ranges: asyncio.Queue[tuple[ComputedRange, ComputedStep]] = field(default_factory=asyncio.Queue)
    leased_until: int = 0
    draft_state: bytes | None = None
    lease_ids: list[str] = field(default_factory=list)
    part_log: PartLog = field(default_factory=PartLog)
    num_bytes: int = 0
    num_parts: int = 0
    num_shared_bytes: int = 0
    closed: bool = False


def no_draft_state(request_id: str) -> None:
    """Stands in for the export of a draft's state on workers without a draft."""
    return


class KVExporter(StepObserver):
    """Runs the transfers of a prefill worker.

    Args:
        part_bytes: size limit of a part.
        reserve_timeout_s: how long a receiver may wait for room.
        export_draft_state: returns the draft's state of a request by its id, once its prompt is computed; ``None``
            when the draft's KV is unusable. Called in the engine's thread.
        choice: chooses encodings; ``None`` means always native.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        transport: KVTransport,
        part_bytes: int,
        reserve_timeout_s: float,
        export_draft_state: Callable[[str], bytes | None] = no_draft_state,
        choice: EncodingChoice | None = None,
    ) -> None:
        self._engine = engine
        self._transport = transport
        self._part_bytes = part_bytes
        self._reserve_timeout_s = reserve_timeout_s
        self._export_draft_state = export_draft_state
        self._choice = choice or EncodingChoice()
        self._bytes_per_token = engine.runner.spec.bytes_per_token
        self._exports: dict[Request, Export] = {}  # by identity: a retried request may have the same id
        self._loop: asyncio.AbstractEventLoop | None = None
        self.num_bytes_sent = 0
        engine.subscribe(self)

    @property
    def num_active(self) -> int:
        return len(self._exports)

    def start(
        self, request: Request, transfer_id: str, peer: str, events: dict[Event, float]
    ) -> asyncio.Task[ExportSummary]:
        """Begins a transfer. Call it before the request enters the engine, whose steps then feed it.

        Args:
            request: its ``request_id`` must be unique among all transfers of this worker.
            events: filled with the transfer's lifecycle events.

        Returns:
            The task that moves the prompt's KV. It raises ``BatonError`` when the transfer failed, after informing the
            receiver. Cancelling the task frees everything on both sides.
        """
        self._loop = asyncio.get_running_loop()
        export = Export(transfer_id, peer, request, events)
        self._exports[request] = export
        task = asyncio.create_task(self._run(export))
        task.add_done_callback(lambda _: self._close(export))  # also runs when the task never got to start
        return task

    async def _run(self, export: Export) -> ExportSummary:
        await export.started.wait()
        started_s = time.monotonic()
        export.events[Event.TRANSFER_STARTED] = started_s
        stream = await self._transport.open(self._offer(export), export.peer)
        with closing(self._choice.passage(export.peer, stream.reservation)) as passage:
            await self._send(export, stream, passage)
        committed_s = time.monotonic()
        export.events[Event.TRANSFER_ACKNOWLEDGED] = committed_s
        spec, cached = self._engine.runner.spec, stream.reservation.num_cached_tokens
        num_tokens = export.request.num_prompt_tokens - cached
        num_layers = len(spec.all_layers if stream.reservation.takes_draft else spec.layers)
        num_native_bytes = num_tokens * spec.layer_bytes_per_token(0, num_layers)
        return ExportSummary(
            num_bytes=export.num_bytes,
            num_parts=export.num_parts,
            num_tokens=num_tokens,
            num_cached_tokens=cached,
            seconds=committed_s - started_s,
            parts=tuple(export.part_log.parts()),
            num_shared_bytes=export.num_shared_bytes,
            num_spared_bytes=max(0, num_native_bytes - export.num_bytes),
        )

    def _offer(self, export: Export) -> TransferOffer:
        return TransferOffer(
            transfer_id=export.transfer_id,
            spec=self._engine.runner.spec,
            token_ids=tuple(export.request.prompt_token_ids),
            deadline_s=self._reserve_timeout_s,
            encodings=self._choice.offers(export.peer),
            cache_salt=export.request.cache_salt,
        )

    async def _send(self, export: Export, stream: KVSendStream, passage: Passage) -> None:
        """Sends the prompt's KV and the commit. Aborts the transfer at the receiver if anything fails."""

        def acknowledged(num_bytes: int) -> None:
            export.part_log.acknowledged(num_bytes)
            passage.acknowledged(num_bytes, time.monotonic())

        committed = False
        try:
            export.events[Event.TRANSFER_RESERVED] = time.monotonic()
            stream.on_acknowledged = acknowledged
            await self._send_all(export, stream, passage)
            takes_draft = stream.reservation.takes_draft
            num_acknowledged = await stream.commit(export.draft_state if takes_draft else None)
            if num_acknowledged != export.num_bytes:
                raise TransferError(f"{export.num_bytes} KV bytes were sent, but {num_acknowledged} were acknowledged.")
            committed = True
        finally:
            if not committed:
                await stream.abort()

    async def _send_all(self, export: Export, stream: KVSendStream, passage: Passage) -> None:
        spec, cache = self._engine.runner.spec, self._engine.runner.cache
        with_draft = stream.reservation.takes_draft
        encoding = self._choice.encoding(stream.reservation)

        def buffer_for(header: PartHeader) -> PartBuffer | None:
            return stream.buffer(header.num_bytes(spec))

        buffers = buffer_for if stream.reservation.shares_memory else None
        done = 0
        while done < export.request.num_prompt_tokens:
            computed, step = await export.ranges.get()
            await step.done()  # otherwise compute time would count as transfer time
            start = max(computed.start, stream.reservation.num_cached_tokens)
            headers = plan_parts(spec, start, computed.end, self._part_bytes, with_draft=with_draft, encoding=encoding)
            async with aclosing(read_parts(cache, computed.block_ids, headers, buffers, step.mark)) as parts:
                async for part in parts:
                    size = len(part.payload)
                    export.part_log.sending(size, part.started_s)
                    passage.sending(size)
                    await stream.send(part.header, part.payload)
                    export.part_log.sent()
                    export.num_parts += 1
                    export.num_bytes += size
                    export.num_shared_bytes += size if part.is_shared else 0
                    self.num_bytes_sent += size
            done = computed.end

    def _close(self, export: Export) -> None:
        self._exports.pop(export.request, None)
        self._engine.post(lambda: self._release(export))

    def _release(self, export: Export) -> None:
        """Ends the leases. Runs in the engine's thread."""
        export.closed = True
        for lease_id in export.lease_ids:
            self._engine.blocks.pool.end_lease(lease_id)
        export.lease_ids.clear()

    def scheduled(self, plan: Sequence[ScheduledSequence]) -> None:
        """Asks the receiver for room; a queued request does not need any yet. Runs in the engine's thread."""
        for sequence in plan:
            export = self._exports.get(sequence.request)
            if export is not None and self._loop is not None and export.leased_until == 0:
                self._loop.call_soon_threadsafe(export.started.set)

    def computed(self, plan: Sequence[ScheduledSequence]) -> None:
        """Leases and queues what the step added. Runs in the engine's thread."""
        leased: list[tuple[Export, ComputedRange]] = []
        for sequence in plan:
            export = self._exports.get(sequence.request)
            if export is not None and not export.closed:
                computed = self._lease_new_range(export, sequence.request)
                if computed is not None:
                    leased.append((export, computed))
        if leased and self._loop is not None:
            step = ComputedStep(self._engine.runner.cache)  # after the draft's writes at the ends of prompts
            self._loop.call_soon_threadsafe(_queue, leased, step)

    def measured(self, sample: StepSample) -> None:
        """Updates the speed of prefill. Runs in the engine's thread."""
        num_bytes = (sample.prompt_tokens + sample.decoding) * self._bytes_per_token
        self._choice.prefill.observe(num_bytes, sample.ms / 1e3)

    def _lease_new_range(self, export: Export, request: Request) -> ComputedRange | None:
        # After a preemption positions are computed again; those before leased_until have been queued already.
        start, end = export.leased_until, min(request.num_computed_tokens, request.num_prompt_tokens)
        if end <= start:
            return None
        block_size = self._engine.blocks.block_size
        block_ids = tuple(request.block_ids[: -(-end // block_size)])
        lease_id = f"{request.request_id}/{start}"
        self._engine.blocks.pool.lease(lease_id, block_ids[start // block_size :])
        export.lease_ids.append(lease_id)
        export.leased_until = end
        if end == request.num_prompt_tokens:
            export.draft_state = self._export_draft_state(request.request_id)
        return ComputedRange(start, end, block_ids)


def _queue(leased: Sequence[tuple[Export, ComputedRange]], step: ComputedStep) -> None:
    for export, computed in leased:
        export.ranges.put_nowait((computed, step))
