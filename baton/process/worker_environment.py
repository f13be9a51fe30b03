"""The environment of worker processes, and how a benchmark comes by the same one."""

from __future__ import annotations

import os
import sys

_VARIABLES = {
    # How often an OpenMP thread looks for work before it sleeps. With libgomp's default two busy workers on one machine
    # spend their time waiting for each other's waiting threads: a step of 25 ms was seen to take 2 s. And the threads
    # of the fused decoder wait for those of the sampling before: a step of two tokens takes 1.4 times as long.
    "GOMP_SPINCOUNT": "1000",
    # glibc gives large blocks back to the system at once and gets them anew, page by page, in the next step. Sampling
    # 32 rows of 49,152 logits takes 13.5 ms that way and 2.1 ms when the memory is kept.
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
    "MALLOC_TRIM_THRESHOLD_": str(2**31),
}
"""Unless the user's own environment says otherwise."""

_ALLOCATOR = "PYTORCH_ALLOC_CONF"
_OLD_ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
"""Which of the two counts when both are set differs between versions of torch."""
# Prompts of all lengths leave holes in a GPU's memory that segments of fixed size cannot join.
_ALLOCATOR_SETTINGS = "expandable_segments:True"

LOCAL_RAY_VARIABLES = {
    # Ray's own 15 leaves workers 3 % of a core that any other program uses.
    "RAY_worker_niceness": "0",
    # Ray would start an idle process for each core first, and wait for them.
    "RAY_prestart_worker_first_driver": "0",
}
"""What Ray itself is started with for a cluster on this machine; the user's own environment counts more there, too."""


def worker_variables() -> dict[str, str]:
    """Environment variables that a worker's process is started with, beside this one's own."""
    allocator = os.environ.get(_ALLOCATOR) or os.environ.get(_OLD_ALLOCATOR) or _ALLOCATOR_SETTINGS
    return {name: os.environ.get(name, value) for name, value in _VARIABLES.items()} | {_ALLOCATOR: allocator}


def is_like_a_worker() -> bool:
    """Whether this process's environment has all that workers have."""
    return all(name in os.environ for name in (*_VARIABLES, _ALLOCATOR))


def become_like_a_worker() -> None:
    """Starts this process anew, by the same command line, if it lacks a variable that workers have.

    They are read when a process starts and when torch is loaded, so it is too late to set them. What computes here
    would be slower than on a worker.
    """
    if not is_like_a_worker():
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **worker_variables()})
