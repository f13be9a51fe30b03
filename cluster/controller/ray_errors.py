"""Ray's errors in a few words. Ray puts remote tracebacks before an error, and long advice around a process's death."""

from __future__ import annotations

from pathlib import Path

from ray._private import worker as ray_worker
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    GetTimeoutError,
    OutOfMemoryError,
    RayError,
    RayTaskError,
)

from baton.core.files import refuse_full_disk

_LEAST_FREE_BYTES = 2**20
_ADVICE = "There are some potential root causes"
"""How Ray begins its advice, which names a lack of memory first whatever the cause is."""


def short_reason(error: Exception) -> str:
    """One line of the error."""
    if isinstance(error, OutOfMemoryError) or "running low on memory" in str(error):
        return "Ray ended it because its node ran out of memory; scale the pools down, or give the node more memory"
    if isinstance(error, GetTimeoutError):
        return "it does not answer"
    if isinstance(error, ActorUnavailableError):
        return "Ray does not reach its process"
    if isinstance(error, ActorDiedError) and not has_failed_to_begin(error):
        return f"its process died{_full_disk()}"
    return _last_line(error)


def has_failed_to_begin(error: Exception) -> bool:
    """Whether an actor could not be made, for instance because its constructor raised an error."""
    return isinstance(error, ActorDiedError) and "creation task" in str(error)


def logged(error: Exception) -> str:
    """What logs say of the error: its remote traceback if it was raised in an actor, but no advice of Ray."""
    if isinstance(error, ActorUnavailableError):
        return _last_line(error)
    return short_reason(error) if isinstance(error, RayError) and not isinstance(error, RayTaskError) else str(error)


def _last_line(error: Exception) -> str:
    """What the error says, without Ray's advice."""
    return (str(error).split(_ADVICE)[0].strip() or type(error).__name__).splitlines()[-1].strip()


def _full_disk() -> str:
    """A remark if this node's Ray has no space left for its files. Ray's processes then die as soon as they start."""
    node = ray_worker._global_node
    if node is None:
        return ""
    folder = Path(node.get_session_dir_path())
    try:
        refuse_full_disk(folder, _LEAST_FREE_BYTES)
    except OSError:
        return f"; the disk of {folder} is full, so Ray can start none until there is space"
    return ""
