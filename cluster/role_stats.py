"""The engine's figures as a wire message."""

from __future__ import annotations

from cluster.wire import worker_pb2
from engine.async_engine import EngineStats


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
