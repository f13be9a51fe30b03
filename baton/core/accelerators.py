"""GPUs by the names that Ray gives them."""

from __future__ import annotations

_GIB = 2**30

MEMORY_BYTES = {
    name: int(gib * _GIB)
    for name, gib in {
        "T4": 14.5,
        "L4": 21.9,
        "A10G": 22.0,
        "A100": 39.3,
        "L40S": 44.3,
        "H100": 79.1,
        "A100-80G": 79.1,
        "H200": 139.7,
    }.items()
}
"""Memory that CUDA offers, by the value of the node label ``ray.io/accelerator-type``; rounded down."""

WITH_FP8 = frozenset({"L4", "L40S", "H100", "H200"})
"""GPUs of compute capability 8.9 or newer."""
