"""The smallest kernel, to find out whether Triton can compile and launch anything at all."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def store_one(target):
    tl.store(target, 1)


def run_probe(device: torch.device) -> None:
    """Compiles the kernel, launches it on a GPU and checks what it wrote.

    Raises:
        Exception: any kind; it says what Triton lacks.
    """
    target = torch.zeros(1, dtype=torch.int32, device=device)
    store_one[(1,)](target)
    if int(target.item()) != 1:
        raise RuntimeError("a kernel was launched and wrote nothing")
