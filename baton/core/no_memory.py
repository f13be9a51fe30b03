"""Recognizes errors that say that there is no memory, and says what to do. No torch here."""

from __future__ import annotations

import re

_TEXT = re.compile(
    r"CUDA out of memory"
    r"|CUDA error: out of memory|CUDA driver error: out of memory|Triton Error \[CUDA\]: out of memory"
    r"|CU(?:BLAS|DNN)_STATUS_ALLOC_FAILED"
    r"|CUBLAS_STATUS_NOT_INITIALIZED"  # torch's message when there is no memory for a handle
    r"|DefaultCPUAllocator: (?:can't allocate|not enough) memory"
)
OUT_OF_MEMORY = (
    "A worker had no memory for this request. Send a shorter prompt, try again when the cluster is less busy, or let "
    "its operator leave the workers more memory: fewer max_num_seqs or kv_blocks of the pool, or a smaller "
    "engine.gpu_memory_utilization."
)


def says_no_memory(error: BaseException) -> bool:
    """Whether the host, or a device according to the error's text, lacked memory for an allocation."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and _TEXT.search(str(error)) is not None)
