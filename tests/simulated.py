"""Simulated workers for tests: a small profile, requests as the router sends them, and their answers."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from baton.core.chunk_budget import SchedulerLimits
from baton.core.queue_priority import NO_PRIORITY, QueuePriority
from baton.core.request import SamplingParams
from baton.core.roles import DECODE, PREFILL
from baton.kv_transfer.base import KVSink
from baton.kv_transfer.payload.in_process import InProcessKVTransport
from baton.rpc.conversions import pack_sequence
from baton.rpc.wire import worker_pb2
from cluster.simulation.profile import StepTimes, TimingProfile, TransferCosts
from cluster.simulation.worker import SimulatedWorker, WorkerSettings

STEP = StepTimes(
    fixed=10.0,
    per_prompt_token=0.1,
    per_attention_pair=1e-4,
    per_sequence=0.5,
    per_context_token=0.01,
    per_drafted_token=0.2,
)


def make_profile(**changes: Any) -> TimingProfile:
    values: dict[str, Any] = {
        "gpu": "test",
        "model": "test",
        "step": STEP,
        "transfer": TransferCosts(fixed_ms=5.0, bytes_per_second=1e6),
        "kv_tokens": 4096,
        "kv_bytes_per_token": 100,
        "noise": 0.0,
        **changes,
    }
    return TimingProfile(**values)


def make_settings(pool: str = DECODE, **changes: Any) -> WorkerSettings:
    settings = WorkerSettings(
        worker_id=f"{pool}-1",
        pool=pool,
        profile=make_profile(),
        limits=SchedulerLimits(chunk_tokens=256, max_num_seqs=16, max_model_len=4096),
        num_blocks=256,
        block_size=16,
        vocab_size=1000,
        eos_token_ids=(2,),
        model_name="test",
        with_steps=False,
    )
    return replace(settings, **changes)


@dataclass
class Answer:
    """The tokens of a request, and when they arrived."""

    token_ids: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    finish_reason: str = ""
    batches: list[worker_pb2.TokenBatch] = field(default_factory=list)
    handoff: worker_pb2.HandoffResult | None = None

    def take(self, batch: worker_pb2.TokenBatch) -> None:
        self.token_ids += batch.token_ids
        self.times_s.append(asyncio.get_running_loop().time())
        self.finish_reason = batch.finish_reason
        self.batches.append(batch)


def prompt(length: int, start: int = 0) -> list[int]:
    """A prompt. Prompts with different ``start`` share no prefix."""
    return [(start * 101 + position) % 997 for position in range(length)]


def sequence(
    name: str, tokens: list[int], max_tokens: int, output: list[int] | None = None, **options: Any
) -> worker_pb2.Sequence:
    queue_priority: QueuePriority = options.pop("queue_priority", NO_PRIORITY)
    params = SamplingParams(**{"max_tokens": max_tokens, "ignore_eos": True, "temperature": 0, **options})
    return pack_sequence(name, tokens, params, output or [], queue_priority=queue_priority)


async def generate(worker: SimulatedWorker, message: worker_pb2.Sequence, transfer_id: str = "") -> Answer:
    answer = Answer()
    request = worker_pb2.GenerateRequest(sequence=message, transfer_id=transfer_id)
    async with aclosing(worker.generate(request)) as batches:
        async for batch in batches:
            answer.take(batch)
    return answer


class Pair:
    """A prefill and a decode worker with a hand-off between them."""

    def __init__(self, **changes: Any) -> None:
        sinks: dict[str, KVSink] = {}
        transport = InProcessKVTransport(sinks)
        self.prefill = SimulatedWorker(make_settings(PREFILL, **changes), transport)
        self.decode = SimulatedWorker(make_settings(DECODE, **changes), transport)
        sinks["decode"] = self.decode.sink

    async def run(self, name: str, tokens: list[int], max_tokens: int) -> Answer:
        """Does what the router does: prefills, and decodes from the first token on."""
        answer = Answer()
        message = worker_pb2.PrefillRequest(sequence=sequence(name, tokens, max_tokens))
        message.handoff.transfer_id, message.handoff.peer = name, "decode"
        async with asyncio.TaskGroup() as group:
            decoding: asyncio.Task[Answer] | None = None
            async with aclosing(self.prefill.prefill(message)) as events:
                async for event in events:
                    if event.HasField("handoff"):
                        answer.handoff = event.handoff
                        continue
                    answer.take(event.first_token)
                    if not answer.finish_reason:
                        known = sequence(name, tokens, max_tokens, answer.token_ids)
                        decoding = group.create_task(generate(self.decode, known, name))
        if decoding is not None:
            rest = decoding.result()
            for batch, at_s in zip(rest.batches, rest.times_s, strict=True):
                answer.take(batch)
                answer.times_s[-1] = at_s
        return answer

    def leaks(self) -> list[str]:
        return [*self.prefill.check(), *self.decode.check()]


def lone_worker(**changes: Any) -> SimulatedWorker:
    return SimulatedWorker(make_settings(**changes), InProcessKVTransport({}))
