"""The engine's figures as wire messages."""

from __future__ import annotations

from collections.abc import Sequence

from baton.core.step_samples import StepSample
from baton.engine.async_engine import EngineStats
from baton.rpc.wire import worker_pb2


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


def pack_step_samples(last_index: int, samples: Sequence[StepSample]) -> worker_pb2.StepSamples:
    """Rows as columns; ``last_index`` is the number of the worker's newest sample."""
    if not samples:
        return worker_pb2.StepSamples(last_index=last_index)
    columns = zip(StepSample._fields, zip(*samples, strict=True), strict=True)
    return worker_pb2.StepSamples(last_index=last_index, **dict(columns))
