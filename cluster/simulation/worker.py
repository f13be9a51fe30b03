"""A simulated worker: the calls of both roles over one engine, for gRPC and in-process clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import count

from baton.core.chunk_budget import SchedulerLimits
from baton.core.errors import BatonError, ContextLengthError, DeadlineError, TransferError, UnsupportedParameterError
from baton.core.kv_spec import KVCacheSpec, LayerSpec
from baton.core.request import FinishReason, Request, SamplingParams
from baton.core.roles import DECODE
from baton.core.step_costs import StepCosts, StepSample
from baton.core.timeline import Event
from baton.engine.kv_cache.block_manager import BlockManager
from baton.engine.scheduling.ordering import EarliestDeadlineFirst, OrderingPolicy
from baton.kv_transfer.base import KVTransport
from baton.rpc.bookings import BookingBoard
from baton.rpc.cache_messages import watch_messages
from baton.rpc.conversions import pack_events, pack_params, unpack_sequence
from baton.rpc.step_cost_messages import pack_step_costs
from baton.rpc.wire import worker_pb2
from cluster.registry.workers import WorkerInfo
from cluster.simulation.engine import SimulatedEngine
from cluster.simulation.handoff import SimulatedHandoff, Uplink
from cluster.simulation.kv_sink import SimulatedKVSink
from cluster.simulation.profile import TimingProfile
from cluster.simulation.sequences import SimulatedOutput, SimulatedSequence
from cluster.simulation.timing import StepWork
from cluster.simulation.tokens import FakeTokens

DTYPE = "bfloat16"
_PROFILE_WORK = tuple(
    StepWork(prompt_tokens=tokens, attention_pairs=tokens * (tokens + 1) // 2, sequences=1)
    for tokens in (16, 64, 128, 256, 512, 1024, 2048, 4096)
) + tuple(
    StepWork(sequences=batch, context_tokens=batch * context)
    for batch, context in ((1, 64), (4, 128), (16, 64), (32, 512), (16, 4096), (1, 16384))
)
"""The kinds of steps that a real worker measures at its start."""


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Settings of a simulated worker.

    Attributes:
        limits: limits of its engine.
        num_blocks, block_size: number and size in tokens of its KV blocks.
        hash_key: key of the hashes of these blocks.
        tokens_per_message: largest number of tokens in one message of a stream.
        with_steps: whether messages describe their steps, which timelines show.
        seed: seed of its noise, combined with its id.
    """

    worker_id: str
    pool: str
    profile: TimingProfile
    limits: SchedulerLimits
    num_blocks: int
    block_size: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    model_name: str
    ordering: OrderingPolicy = field(default_factory=EarliestDeadlineFirst)
    prefix_caching: bool = True
    hash_key: bytes = b""
    tokens_per_message: int = 16
    with_steps: bool = True
    reserve_timeout_s: float = 30.0
    claim_timeout_s: float = 30.0
    seed: int = 0

    @property
    def kv_spec(self) -> KVCacheSpec:
        """A layout of the right size. Hand-offs only compare it with that of the other end."""
        elements = max(1, self.profile.kv_bytes_per_token // 4)
        layer = LayerSpec(1, elements, elements)
        return KVCacheSpec(f"simulated {self.profile.model}", DTYPE, self.block_size, (layer,))

    def info(self, address: str, peer_proof: str, node: str, pid: int) -> WorkerInfo:
        """The worker's description for the router."""
        return WorkerInfo(
            worker_id=self.worker_id,
            pool=self.pool,
            address=address,
            peer_proof=peer_proof,
            node=node,
            pid=pid,
            device=f"simulated {self.profile.gpu}",
            model_name=self.model_name,
            max_model_len=self.limits.max_model_len,
            vocab_size=self.vocab_size,
            eos_token_ids=self.eos_token_ids,
            kv_fingerprint=self.kv_spec.fingerprint(),
            kv_bytes_per_token=self.profile.kv_bytes_per_token,
            block_size=self.block_size,
            dtype=DTYPE,
            draft_method="",
            chunk_tokens=self.limits.chunk_tokens,
            max_num_seqs=self.limits.max_num_seqs,
            kv_blocks=self.num_blocks,
        )


class SimulatedWorker:
    """A simulated worker, which must be created on its event loop.

    Args:
        transport: transport of its hand-offs to decode workers.

    Attributes:
        bookings: those of the calls in progress, for the other routers.
    """

    def __init__(self, settings: WorkerSettings, transport: KVTransport) -> None:
        self.settings = settings
        profile = settings.profile
        self._loop = asyncio.get_running_loop()
        self._transport = transport
        self.bookings = BookingBoard(self._loop.time)
        self._eos = frozenset(settings.eos_token_ids)
        self._spec = settings.kv_spec
        self.blocks = BlockManager(
            settings.num_blocks,
            settings.block_size,
            prefix_caching=settings.prefix_caching,
            hash_key=settings.hash_key,
        )
        costs = profile.costs(settings.pool)
        tokens = FakeTokens(settings.vocab_size, min(self._eos, default=None), profile.output_tokens)
        self.engine = SimulatedEngine(
            profile,
            costs,
            settings.limits,
            self.blocks,
            tokens,
            ordering=settings.ordering,
            tokens_per_message=settings.tokens_per_message,
            seed=f"{settings.seed}:{settings.worker_id}",
            on_free=lambda: self.sink.retry_soon(),
        )
        self.sink = SimulatedKVSink(self.engine, self.blocks, settings.claim_timeout_s)
        self._uplink = Uplink(profile.transfer)
        self._started_s = self._loop.time()
        self._num_calls = count(1)
        self._num_handoffs = 0
        for work in _PROFILE_WORK:
            self.engine.step_costs.measured(_profile_sample(work, costs))

    async def prefill(
        self, message: worker_pb2.PrefillRequest, timeout_s: float | None = None
    ) -> AsyncGenerator[worker_pb2.PrefillEvent]:
        """Implements ``Prefill`` of ``proto/worker.proto``. Closing the generator aborts request and hand-off.

        Args:
            timeout_s: time limit, after which it fails with :class:`DeadlineError`; ``None`` means no limit.
        """
        await self._arrive()
        events = {Event.PREFILL_QUEUED: self._loop.time()}
        request = self._request(message.sequence)
        request.hands_off = True
        handoff: SimulatedHandoff | None = None
        lease_id = request.request_id
        sequence = SimulatedSequence(request)
        if message.HasField("handoff"):
            handoff = self._begin_handoff(request, message.handoff, events)
            sequence.on_computed = self._leasing(request, handoff)
        self._check(request, 1)
        timer = self._limit(sequence, timeout_s)
        try:
            self.engine.add(sequence)
            output = await _next(sequence)
            events[Event.FIRST_TOKEN_SAMPLED] = output.at_s
            events[Event.PREFILL_STARTED] = request.first_scheduled_s or output.at_s
            batch = self._batch(output, request)
            yield worker_pb2.PrefillEvent(first_token=batch, events=pack_events(events))
            if handoff is not None and output.finish_reason is FinishReason.HANDED_OFF:
                result = await handoff.outcome()
                self.blocks.pool.end_lease(lease_id)
                yield worker_pb2.PrefillEvent(handoff=result, events=pack_events(events))
        finally:
            if timer is not None:
                timer.cancel()
            self.engine.abort(sequence)
            self.blocks.pool.end_lease(lease_id)
            self.engine.wake()
            if handoff is not None:
                self._num_handoffs -= 1
                await handoff.close()  # last, since a second cancellation ends it early

    async def generate(
        self, message: worker_pb2.GenerateRequest, timeout_s: float | None = None
    ) -> AsyncGenerator[worker_pb2.TokenBatch]:
        """Implements ``Generate`` of ``proto/worker.proto``. Closing the generator aborts the request."""
        if not message.transfer_id:
            await self._arrive()
        received_s = self._loop.time()
        request = self._request(message.sequence)
        self._check(request, request.params.max_tokens)
        events = {Event.DECODE_RECEIVED: received_s}
        if message.transfer_id:
            imported = await self.sink.claim(message.transfer_id)
            try:
                if imported.holder is None or imported.holder.num_tokens != request.num_prompt_tokens:
                    raise TransferError(f"transfer {message.transfer_id} carried the KV of a different prompt.")
                events[Event.KV_COMMITTED] = imported.committed_s
                self.sink.hand_over(imported, request)
            finally:
                self.sink.release(imported)
        request.arrival_s = events[Event.DECODE_QUEUED] = self._loop.time()
        sequence = SimulatedSequence(request)
        timer = self._limit(sequence, timeout_s)
        try:
            self.engine.add(sequence)
            while True:
                output = await _next(sequence)
                is_prompt = bool(events) and not message.transfer_id
                batch = self._batch(output, request, with_steps=bool(events), is_prompt=is_prompt)
                if events:
                    events[Event.DECODE_STARTED] = request.first_scheduled_s or request.arrival_s
                    batch.events.extend(pack_events(events))
                    events = {}
                yield batch
                if output.finish_reason is not None:
                    return
        finally:
            if timer is not None:
                timer.cancel()
            self.engine.abort(sequence)

    async def probe(self) -> None:
        """Implements ``Probe`` of ``proto/worker.proto``."""
        if self.engine.num_running or self.engine.num_waiting:
            return  # its steps are the proof
        params = pack_params(SamplingParams(max_tokens=1, ignore_eos=True))
        sequence = worker_pb2.Sequence(request_id="probe", prompt_token_ids=[0], params=params)
        async with aclosing(self.generate(worker_pb2.GenerateRequest(sequence=sequence))) as batches:
            async for _ in batches:
                pass

    def watch_cache(self) -> AsyncGenerator[worker_pb2.CacheEvents]:
        """Implements ``WatchCache`` of ``proto/worker.proto``."""
        return watch_messages(self.blocks.prefix_cache.events)

    def stats(self) -> worker_pb2.WorkerStats:
        """Implements ``GetStats`` of ``proto/worker.proto``."""
        engine, usage = self.engine, self.blocks.usage()
        return worker_pb2.WorkerStats(
            worker_id=self.settings.worker_id,
            role=self.settings.pool,
            num_running=engine.num_running,
            num_waiting=engine.num_waiting,
            num_transfers=self.sink.num_active if self.settings.pool == DECODE else self._num_handoffs,
            kv_blocks_total=usage.total,
            kv_blocks_used=usage.used,
            kv_blocks_cached=usage.cached,
            num_preemptions=engine.num_preemptions,
            num_steps=engine.num_steps,
            prefill_tokens=engine.num_prefill_tokens,
            generated_tokens=engine.num_generated_tokens,
            kv_bytes_sent=self._uplink.num_bytes_sent,
            uptime_s=self._loop.time() - self._started_s,
            step_costs=pack_step_costs(engine.step_costs.report()),
        )

    def check(self) -> list[str]:
        """Sentences about leaked blocks; empty if there are none."""
        return self.blocks.check([*self.engine.holders(), *self.sink.holders()])

    def stop(self, error: BatonError) -> None:
        """Stops the engine. Readers of streams get ``error``."""
        self.engine.stop(error)

    def _limit(self, sequence: SimulatedSequence, timeout_s: float | None) -> asyncio.TimerHandle | None:
        if timeout_s is None:
            return None
        error = DeadlineError(f"{self.settings.worker_id} did not answer in time.")
        return self._loop.call_later(timeout_s, self.engine.fail, sequence, error)

    async def _arrive(self) -> None:
        """Delays a request by the delivery in both directions, since only the time of the first token matters."""
        if self.settings.profile.delivery_ms:
            await asyncio.sleep(self.settings.profile.delivery_ms / 1e3)

    def _request(self, message: worker_pb2.Sequence) -> Request:
        request = unpack_sequence(message, self._eos, self._loop.time())
        if request.prompt_logprobs is not None:
            raise UnsupportedParameterError(
                "Simulated workers compute no log probabilities of prompts; leave out prompt_logprobs, and echo "
                "together with logprobs.",
                param="prompt_logprobs",
            )
        if request.is_traced:
            raise UnsupportedParameterError(
                "Simulated workers draft no tokens; leave out speculation.trace.", param="speculation"
            )
        # A second attempt may arrive before the first one has ended here.
        request.request_id = f"{request.request_id}#{next(self._num_calls)}"
        return request

    def _check(self, request: Request, num_new: int) -> None:
        limits, room = self.settings.limits, self.settings.num_blocks * self.settings.block_size
        needed = request.num_prompt_tokens + num_new
        if needed > limits.max_model_len or needed - 1 > room:
            raise ContextLengthError(
                f"The request needs {needed} tokens, but a simulated worker allows {limits.max_model_len} and its KV "
                f"cache holds {room}.",
                param="max_tokens",
            )

    def _begin_handoff(
        self, request: Request, message: worker_pb2.Handoff, events: dict[Event, float]
    ) -> SimulatedHandoff:
        self._num_handoffs += 1
        return SimulatedHandoff(
            self._transport,
            self._uplink,
            request,
            self._spec,
            message.transfer_id,
            message.peer,
            self.settings.reserve_timeout_s,
            self.settings.profile.kv_bytes_per_token,
            events,
        )

    def _leasing(self, request: Request, handoff: SimulatedHandoff) -> Callable[[int, float], None]:
        """Returns a callback that passes on chunks, and leases the blocks of the finished prompt."""

        def computed(num_tokens: int, now_s: float) -> None:
            handoff.computed(num_tokens, now_s)
            if num_tokens >= request.num_prompt_tokens:
                self.blocks.pool.lease(request.request_id, request.block_ids)

        return computed

    def _batch(
        self, output: SimulatedOutput, request: Request, *, with_steps: bool = False, is_prompt: bool = False
    ) -> worker_pb2.TokenBatch:
        """Converts an output to a message.

        Args:
            with_steps: overrides the settings. The end of a local prefill shows in its step.
            is_prompt: its steps computed the prompt.
        """
        num_uncached = request.num_prompt_tokens - request.num_cached_tokens
        reason = output.finish_reason
        batch = worker_pb2.TokenBatch(
            token_ids=output.token_ids,
            finish_reason="" if reason is None or reason is FinishReason.HANDED_OFF else str(reason),
            num_cached_tokens=request.num_cached_tokens,
            num_drafted=output.num_drafted,
            num_accepted=output.num_accepted,
        )
        if with_steps or self.settings.with_steps:
            steps = output.steps
            batch.steps.add(
                index=steps.last_index,
                started_s=steps.started_s,
                ended_s=steps.ended_s,
                busy_s=steps.ended_s - steps.started_s,
                num_steps=steps.num_steps,
                num_computed_tokens=num_uncached if is_prompt else len(output.token_ids),
                num_sequences=steps.sequences,
                num_batch_tokens=steps.sequences + steps.prompt_tokens,
                num_prompt_tokens=steps.prompt_tokens,
            )
        return batch


async def _next(sequence: SimulatedSequence) -> SimulatedOutput:
    output = await sequence.outputs.get()
    if isinstance(output, BatonError):
        raise output
    return output


def _profile_sample(work: StepWork, costs: StepCosts) -> StepSample:
    decoding = 0 if work.prompt_tokens else work.sequences
    return StepSample(
        work.ms(costs),
        work.prompt_tokens,
        work.attention_pairs,
        work.sequences,
        decoding,
        round(work.context_tokens),
        0,
        0,
    )
