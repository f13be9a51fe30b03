"""As many open files as a load needs connections."""

from __future__ import annotations

import math
import resource
from collections.abc import Sequence

from baton.bench.stages import Stage
from baton.core.errors import ConfigError

_OTHER_FILES = 100
"""What is open besides connections: libraries, the event loop, files of the report, with some room."""


def make_room_for_connections(stages: Sequence[Stage]) -> None:
    """Raises this process's soft limit of open files to what the stages need, where the hard one allows it.

    Raises:
        ConfigError: see :func:`files_needed`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = files_needed(stages, None if hard == resource.RLIM_INFINITY else hard)
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def files_needed(stages: Sequence[Stage], most: int | None) -> int:
    """Open files for the stage with the most connections: one for each request that is under way.

    An open loop without --max-inflight could have all its requests under way. It hardly ever does, so it takes what
    there is.

    Args:
        most: that this process may have open; None for any number.

    Raises:
        ConfigError: more clients or requests in flight were asked for than that leaves room for.
    """
    needed = 0
    for stage in stages:
        option, connections = _connections(stage)
        files = connections + _OTHER_FILES
        if most is not None and files > most:
            if option is not None:
                raise ConfigError(
                    f"{option} {connections} needs as many connections, but this process may have {most} files open at "
                    f"most. Raise that hard limit to {files} (`ulimit -Hn`, or LimitNOFILE= of a service), or lower "
                    f"{option}."
                )
            files = most
        needed = max(needed, files)
    return needed


def _connections(stage: Stage) -> tuple[str | None, int]:
    """Most of a stage, and the option that says so."""
    if not stage.is_open:
        return "--concurrency", stage.concurrency
    bounds = stage.bounds
    requests = bounds.requests + bounds.warmup_requests + math.ceil(2 * stage.rate * bounds.warmup_s)
    if stage.max_inflight is not None and stage.max_inflight <= requests:
        return "--max-inflight", stage.max_inflight
    return None, requests
