"""Notices that the raylet of this process has ended. Ray then ends the process within one to three seconds.

That is enough to end open streams with an error. A local Ray ends in this way when its `baton up` is killed.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping

PID_VARIABLE = "RAY_RAYLET_PID"
"""Where a raylet tells its process id to the processes that it starts."""
_LOOK_EVERY_S = 0.1


async def raylet_ends(
    variables: Mapping[str, str] = os.environ,
    parent: Callable[[], int] = os.getppid,
    look_every_s: float = _LOOK_EVERY_S,
) -> None:
    """Returns when the raylet that has started this process is not its parent any more.

    It never returns in a process that a raylet has not started, or not directly.

    Args:
        parent: the process id of the parent.
    """
    raylet = parent()
    if variables.get(PID_VARIABLE) != str(raylet):
        await asyncio.Event().wait()
    while parent() == raylet:  # noqa: ASYNC110 (the kernel sets no event)
        await asyncio.sleep(look_every_s)
