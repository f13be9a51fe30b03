"""The environment of worker processes, and a way for benchmarks to use the same one."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

_VARIABLES = {
    # How often an OpenMP thread looks for work before it sleeps. With libgomp's default, spinning threads of two busy
    # workers on one machine block each other: a step of 25 ms can take 2 s. The threads of the fused decoder also wait
    # for those of the sampling before, which makes a step of two tokens 1.4 times as long.
    "GOMP_SPINCOUNT": "1000",
    # glibc returns large blocks to the system at once and allocates them again, page by page, in the next step.
    # Sampling 32 rows of 49,152 logits takes 13.5 ms that way, and 2.1 ms if the memory is kept.
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
    "MALLOC_TRIM_THRESHOLD_": str(2**31),
}
"""Defaults, which the user's environment overrides."""

_ALLOCATOR = "PYTORCH_ALLOC_CONF"
_OLD_ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
"""The precedence of the two differs between versions of torch."""
# Prompts of varying lengths fragment a GPU's memory if segments have a fixed size.
_ALLOCATOR_SETTINGS = "expandable_segments:True"

LOCAL_RAY_VARIABLES = {
    # Ray's default of 15 leaves workers 3 % of a core if another program uses it.
    "RAY_worker_niceness": "0",
    # Otherwise Ray first starts an idle process for each core, and waits for them.
    "RAY_prestart_worker_first_driver": "0",
    # Otherwise Ray's control store keeps records of the last 100,000 calls of actors, 3.7 kB each, and the router alone
    # makes a call every second. Only Ray's dashboard and its commands show them.
    "RAY_task_events_report_interval_ms": "0",
}
"""Variables of Ray itself for a cluster on this machine. The user's environment overrides them too."""

_CARRIED = ("BATON_CACHE", "HF_ENDPOINT", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_TOKEN")
"""Variables of the user who starts a cluster, which other machines need to find or fetch models."""


def carried_variables() -> dict[str, str]:
    """Those of this process's variables that all processes of a cluster get, secrets among them.

    They travel as arguments of actors. In Ray's runtime environments they would be on command lines and in logs.
    """
    return {name: os.environ[name] for name in _CARRIED if name in os.environ}


def adopt_variables(variables: Mapping[str, str]) -> None:
    """Sets the variables that this process does not have, since its machine may have values of its own."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def worker_variables() -> dict[str, str]:
    """Environment variables to add for a worker's process."""
    allocator = os.environ.get(_ALLOCATOR) or os.environ.get(_OLD_ALLOCATOR) or _ALLOCATOR_SETTINGS
    return {name: os.environ.get(name, value) for name, value in _VARIABLES.items()} | {_ALLOCATOR: allocator}


def is_like_a_worker() -> bool:
    """Whether this process's environment has all variables of workers."""
    return all(name in os.environ for name in (*_VARIABLES, _ALLOCATOR))


def become_like_a_worker() -> None:
    """Restarts this process with the same command line if it lacks a variable of workers.

    The variables are read at process start and when torch is loaded, so they cannot be set later. Without them,
    computation is slower than on a worker.
    """
    if not is_like_a_worker():
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **worker_variables()})
