"""Whether a worker of one pool can go on as one of the other, with the weights and the cache that it has."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from baton.core.roles import DECODE
from cluster.config.config import BatonConfig
from cluster.registry.workers import WorkerInfo


class AskedBy(StrEnum):
    """Whose decision a role change was; values of a label."""

    AUTOSCALER = "autoscaler"
    OPERATOR = "operator"


def role_change_obstacle(config: BatonConfig, workers: Iterable[WorkerInfo] = ()) -> str:
    """Why it cannot, and what would help; empty when it can.

    Args:
        workers: those that are ready; they know whether there is a draft.
    """
    prefill, decode = config.prefill, config.decode
    if config.simulation.profile is not None:
        return "simulated workers have no weights to keep; scale the pools instead."
    if prefill.resources != decode.resources:
        return (
            "prefill.resources and decode.resources differ, and Ray grants a process its resources once. "
            "Make them equal, or start new workers."
        )
    if (prefill.kv_blocks, prefill.kv_memory_gib) != (decode.kv_blocks, decode.kv_memory_gib):
        return (
            "prefill and decode have KV caches of different sizes (kv_blocks, kv_memory_gib), and a process keeps the "
            "one that it has. Make them equal, or start new workers."
        )
    has_draft = any(info.draft_method for info in workers if info.pool == DECODE)
    if has_draft and not config.speculation.draft_on_prefill:
        return (
            "prefill workers have no draft loaded, and decode workers need it. Set speculation.draft_on_prefill, or "
            "start new workers."
        )
    return ""
