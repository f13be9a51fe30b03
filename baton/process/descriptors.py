"""The limit of open files, which also bounds a process's connections."""

from __future__ import annotations

import resource
from contextlib import suppress


def raise_descriptor_limit() -> int:
    """Raises the soft limit of open files to the hard limit, which needs no privilege. Returns the limit in force.

    Child processes inherit it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):  # a hard limit above the kernel's own, or a sandbox that forbids the call
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
