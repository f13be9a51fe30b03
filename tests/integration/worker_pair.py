"""A prefill and a decode worker in this process, each with its own gRPC server, and functions in place of the router.
There is no Ray: the code that runs here is exactly the code inside the actors.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
from transformers import PreTrainedModel

from baton.core.errors import rebuild_error
from baton.core.request import FinishReason, SamplingParams, TokenLogprobs
from baton.engine.async_engine import AsyncEngine
from baton.engine.draft.loading import LoadedDraft
from baton.engine.models.model_loader import prepare_model
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.runner.options import RunnerOptions
from baton.rpc.channel import PeerServer, message_limit
from baton.rpc.conversions import pack_sequence, unpack_finish_reason, unpack_logprobs
from baton.rpc.wire import worker_pb2, worker_pb2_grpc
from benchmarks.device_run.attention_world import poison
from cluster.config.config import BatonConfig
from cluster.registry.worker_client import WorkerClient
from cluster.worker.role import WorkerContext
from cluster.worker.worker_service import WorkerService
from decode_worker.role import DecodeRole
from prefill_worker.role import PrefillRole
from tests.credentials import CREDENTIALS, connect, send_to
from tests.engine_runs import BLOCK_SIZE, build_runner
from tests.waiting import TIMEOUT_S


@dataclass(slots=True)
class Answer:
    """The answer that a client would receive."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    handoff: worker_pb2.HandoffResult | None = None

    def take(self, batch: worker_pb2.TokenBatch) -> None:
        self.token_ids += batch.token_ids
        self.logprobs += unpack_logprobs(batch) or ()
        self.finish_reason = unpack_finish_reason(batch)


@dataclass(slots=True)
class HostedWorker:
    """A role behind a gRPC server on a free loopback port."""

    role: Any
    server: grpc.aio.Server
    address: str
    client: WorkerClient

    @property
    def engine(self) -> AsyncEngine:
        engine: AsyncEngine = self.role._engine
        return engine

    async def problems(self) -> list[str]:
        """Inconsistencies of the block pool, where only requests and leases may hold blocks.

        A reservation that outlives its transfer is also a leak.
        """

        def check() -> list[str]:
            return self.engine.blocks.check(self.engine.scheduler.requests)

        return await self.engine.call(check)

    async def is_idle(self) -> bool:
        stats = await self.client.stats()
        leases = await self.engine.call(lambda: len(self.engine.blocks.pool.leases))
        return not (stats.num_running or stats.num_waiting or stats.num_transfers or stats.kv_blocks_used or leases)


class WorkerPair:
    """The two workers, with methods that do the router's work."""

    def __init__(self, prefill: HostedWorker, decode: HostedWorker) -> None:
        self.prefill = prefill
        self.decode = decode
        self._ids = itertools.count(1)

    def new_id(self) -> str:
        return f"request-{next(self._ids)}"

    def prefill_request(
        self, request_id: str, prompt: Sequence[int], params: SamplingParams, transfer_id: str | None = None
    ) -> worker_pb2.PrefillRequest:
        message = worker_pb2.PrefillRequest(sequence=pack_sequence(request_id, prompt, params))
        message.handoff.transfer_id = transfer_id or f"{request_id}/1"
        send_to(message.handoff, self.decode.address)
        return message

    async def generate(self, prompt: Sequence[int], params: SamplingParams, method: str | None = None) -> Answer:
        """Runs one request through both workers, with drafts by ``method``.

        Raises:
            BatonError: the error of the worker that failed; the hand-off's takes precedence over the decode worker's.
        """
        answer, request_id = Answer(), self.new_id()
        message = self.prefill_request(request_id, prompt, params)
        async with aclosing(self.prefill.client.prefill(message, TIMEOUT_S)) as events:
            first = (await anext(events)).first_token
            answer.num_cached_tokens = first.num_cached_tokens
            answer.take(first)
            if answer.finish_reason is not None:
                assert [event async for event in events] == []
                return answer
            async with _background(
                self.continue_from(answer, request_id, prompt, params, message.handoff.transfer_id, method)
            ) as decoding:
                answer.handoff = (await anext(events)).handoff
                if answer.handoff.error_code:
                    raise rebuild_error(answer.handoff.error_code, answer.handoff.error_message)
                await decoding
        return answer

    async def continue_from(
        self,
        answer: Answer,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        transfer_id: str = "",
        method: str | None = None,
    ) -> None:
        """Decodes to the end; without a transfer the decode worker computes all known tokens itself."""
        message = worker_pb2.GenerateRequest(
            sequence=pack_sequence(request_id, prompt, params, answer.token_ids, method), transfer_id=transfer_id
        )
        async with aclosing(self.decode.client.generate(message, TIMEOUT_S)) as batches:
            async for batch in batches:
                answer.take(batch)

    async def generate_all(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[int]]:
        """Runs all prompts concurrently."""
        answers = await asyncio.gather(*(self.generate(prompt, params) for prompt in prompts))
        return [answer.token_ids for answer in answers]

    async def settle(self, timeout_s: float = 30.0) -> None:
        """Waits until both workers are idle, then checks that every block is free or cached."""
        async with asyncio.timeout(timeout_s):
            while not (await self.prefill.is_idle() and await self.decode.is_idle()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        for worker in (self.prefill, self.decode):
            assert await worker.problems() == []
            assert (await worker.client.stats()).num_leaked_blocks == 0


@dataclass(frozen=True, slots=True)
class Runners:
    """The runners of a pair, with the same weights. They can be reused by later pairs."""

    prefill: ModelRunner
    decode: ModelRunner
    prefill_draft: LoadedDraft | None = None
    decode_draft: LoadedDraft | None = None

    @classmethod
    def with_drafts(
        cls,
        model: PreTrainedModel,
        prefill_draft: Callable[[PreTrainedModel], LoadedDraft] | None,
        decode_draft: Callable[[PreTrainedModel], LoadedDraft] | None,
        num_blocks: int = 512,
        kv_cache: str = "native",
    ) -> Runners:
        """Runners with a draft for each side, made for its copy of the model; ``None`` means no draft."""
        models = copy.deepcopy(model), copy.deepcopy(model)
        drafts = [make and make(own) for make, own in zip((prefill_draft, decode_draft), models, strict=True)]
        runners = [
            ModelRunner(
                prepare_model(own, "float32"),
                num_blocks,
                BLOCK_SIZE,
                RunnerOptions(kv_cache=kv_cache),
                draft=draft.network if draft else None,
            )
            for own, draft in zip(models, drafts, strict=True)
        ]
        return cls(runners[0], runners[1], drafts[0], drafts[1])

    @classmethod
    def of(cls, model: PreTrainedModel, num_blocks: int = 512, num_decode_blocks: int | None = None) -> Runners:
        """Runners with copies of ``model``, because a model can be bound to only one cache."""
        return cls(
            build_runner(copy.deepcopy(model), num_blocks),
            build_runner(copy.deepcopy(model), num_decode_blocks or num_blocks),
        )

    def forget(self) -> None:
        """Fills the caches with NaN, so that reads of unwritten KV are noticed."""
        for runner in (self.prefill, self.decode):
            poison(runner.cache)


def pair_config(**sections: dict[str, Any]) -> BatonConfig:
    """A configuration for small, fast workers; ``sections`` are those of the configuration file."""
    defaults: dict[str, dict[str, Any]] = {
        "engine": {"block_size": 4, "device": "cpu", "threads": 1},
        "prefill": {"chunk_tokens": 64},
        "decode": {"chunk_tokens": 64},
        "kv_transfer": {"part_bytes": 4096, "claim_timeout_s": 5.0, "reserve_timeout_s": 5.0},
    }
    names = defaults.keys() | sections.keys()
    return BatonConfig.from_dict({name: {**defaults.get(name, {}), **sections.get(name, {})} for name in names})


@asynccontextmanager
async def worker_pair(runners: Runners, config: BatonConfig | None = None) -> AsyncIterator[WorkerPair]:
    """Starts both workers with empty caches, and stops them at the end."""
    config = config or pair_config()
    runners.forget()
    prefill = await _host("prefill", PrefillRole, runners.prefill, runners.prefill_draft, config)
    decode = await _host("decode", DecodeRole, runners.decode, runners.decode_draft, config)
    try:
        yield WorkerPair(prefill, decode)
    finally:
        for worker in (prefill, decode):
            await worker.client.close()
            await worker.server.stop(grace=0)
            await worker.role.stop()


async def _host(
    pool: str, role_class: Any, runner: ModelRunner, draft: LoadedDraft | None, config: BatonConfig
) -> HostedWorker:
    context = WorkerContext(
        f"{pool}-1", config, config.pool(pool), runner, runner.loaded.max_model_len, 1, CREDENTIALS, draft
    )
    role = role_class(context)
    server = PeerServer(CREDENTIALS, message_limit(context.max_model_len, config.kv_transfer.part_bytes))
    worker_pb2_grpc.add_WorkerServicer_to_server(WorkerService(f"{pool}-1", pool, role, context.bookings), server.grpc)
    address = server.bind("127.0.0.1")
    await role.start(server.grpc, "127.0.0.1")
    await server.start()
    return HostedWorker(role, server, address, connect(address))


@asynccontextmanager
async def _background(work: Coroutine[Any, Any, None]) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
