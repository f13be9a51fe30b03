"""What users read when the workers of a pool do not become ready."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cluster.controller.pool_member import PoolMember

_STILL_LOADING = (
    "The others are still loading, or hang. If the machine is slow, or the model large, raise ray.start_timeout_s. The "
    "first start on a machine also compiles the decoder; finished parts are kept, so another attempt takes less time."
)


def explain_failures(pool: str, count: int, failed: Iterable[PoolMember]) -> str:
    """Why starts have failed, each reason once.

    Args:
        count: number of failed starts in a row.
        failed: the last of them.
    """
    workers: dict[str, list[str]] = {}
    for member in failed:
        workers.setdefault(member.reason, []).append(member.worker_id)
    reasons = [f"  {', '.join(ids)}: {reason}" for reason, ids in workers.items()]
    return "\n".join([f"{count} starts of {pool} workers have failed in a row:", *reasons])


def explain_wait(members: Sequence[PoolMember], places: str) -> str:
    """Why workers are not ready yet.

    Args:
        members: all workers of the pool, including dead ones.
        places: why some may be waiting for a place; empty if none is.
    """
    reasons = [places, *(member.reason for member in members if not member.is_pending)]
    return "\n".join(dict.fromkeys(filter(None, reasons))) or _STILL_LOADING
