"""The interface between a worker's process and its role, and the engine's figures as wire messages."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Protocol

import grpc.aio

from baton.core.steps import StepProgress
from baton.engine.async_engine import EngineStats
from baton.engine.draft.loading import LoadedDraft
from baton.engine.runner.model_runner import ModelRunner
from baton.grammar.compiler import GrammarCompiler
from baton.rpc.bookings import BookingBoard
from baton.rpc.credentials import PeerCredentials
from baton.rpc.step_cost_messages import pack_step_costs
from baton.rpc.wire import worker_pb2
from cluster.config.config import BatonConfig
from cluster.config.worker_config import PoolConfig


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """What a worker's process gives to its role.

    Attributes:
        worker_id: unique in the cluster, e.g. ``"prefill-1"``.
        config: configuration of the whole cluster.
        pool: configuration of this worker's pool.
        runner: model and cache, which outlive the role.
        max_model_len: limit of a request's prompt and output tokens together.
        num_threads: CPU threads of the engine.
        credentials: of calls to other workers.
        draft: the draft, if the role runs one; the runner has it too.
        grammars: compiles grammars for the model's vocabulary; without it, requests with grammars are refused.
        bookings: those of the calls in progress, which the role's services keep.
    """

    worker_id: str
    config: BatonConfig
    pool: PoolConfig
    runner: ModelRunner
    max_model_len: int
    num_threads: int
    credentials: PeerCredentials
    draft: LoadedDraft | None = None
    grammars: GrammarCompiler | None = None
    bookings: BookingBoard = field(default_factory=BookingBoard)

    @property
    def overlaps_scheduling(self) -> bool:
        """Whether steps are launched before the tokens of earlier steps are known, if no draft needs these tokens.

        ``auto`` means no on the CPU, where the forward pass itself occupies the host, and where the forward pass waits
        for the device. The latter is known only after graph capture, so ask in each step.
        """
        setting = self.config.engine.overlap_scheduling
        return setting == "on" or (
            setting == "auto" and self.runner.device.type != "cpu" and not self.runner.forward_waits
        )


class WorkerRole(Protocol):
    """Prefill or decode. Implementations are constructed with a :class:`WorkerContext`."""

    async def start(self, server: grpc.aio.Server, host: str) -> None:
        """Registers the role's gRPC services with a server that is not started yet, and starts the engine.

        Args:
            host: address at which other workers reach this one.
        """
        ...

    async def profile(self) -> None:
        """Measures a few steps of the started engine before it serves requests.

        Raises:
            BatonError: the engine failed.
        """
        ...

    def watch_cache(self) -> AsyncGenerator[worker_pb2.CacheEvents]:
        """Yields the content of the prefix cache, then every change until the iterator is closed."""
        ...

    async def closed(self) -> None:
        """Waits until the engine has ended, by :meth:`stop` or by a fault."""
        ...

    def progress(self) -> StepProgress:
        """How far the engine's steps have come. Does not wait for the engine.

        Raises:
            WorkerLostError: the engine has ended.
        """
        ...

    async def probe(self) -> None:
        """Computes one token. Raises ``BatonError`` if the engine fails."""
        ...

    async def fill_stats(self, stats: worker_pb2.WorkerStats) -> None:
        """Adds the role's figures."""
        ...

    async def stop(self) -> None:
        """Aborts running requests and frees everything except the runner."""
        ...


def fill_engine_stats(message: worker_pb2.WorkerStats, stats: EngineStats) -> None:
    message.num_running = stats.num_running
    message.num_waiting = stats.num_waiting
    message.kv_blocks_total = stats.blocks.total
    message.kv_blocks_used = stats.blocks.used
    message.kv_blocks_cached = stats.blocks.cached
    message.num_leaked_blocks = stats.num_leaked_blocks
    message.num_preemptions = stats.num_preemptions
    message.num_steps = stats.num_steps
    message.prefill_tokens = stats.num_prefill_tokens
    message.generated_tokens = stats.num_generated_tokens
    message.step_costs.CopyFrom(pack_step_costs(stats.step_costs))
