"""Kernels compiled as they would be launched, for GPUs that are not there."""

from __future__ import annotations

from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

_POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int8: "*i8",
    torch.float8_e4m3fn: "*fp8e4nv",
}


class Launches:
    """Stands in for a kernel, and keeps what would be launched."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **kwargs: self.calls.append((args, kwargs))

    def compile(self, capability: int) -> str:
        """PTX of the last launch."""
        args, kwargs = self.calls[-1]
        warps = {name: kwargs.pop(name) for name in ("num_warps",) if name in kwargs}
        named = {**dict(zip(self.kernel.arg_names, args, strict=False)), **kwargs}
        signature = {name: "constexpr" if name in kwargs else _kind_of(value) for name, value in named.items()}
        constants = {(self.kernel.arg_names.index(name),): value for name, value in kwargs.items()}
        divisible = {
            (index,): [["tt.divisibility", 16]]
            for index, name in enumerate(self.kernel.arg_names)
            if signature[name].startswith("*") or (name.endswith("_stride") and named[name] % 16 == 0)
        }
        source = ASTSource(self.kernel, signature, constants, divisible)
        return str(compile(source, target=GPUTarget("cuda", capability, 32), options=warps).asm["ptx"])


def _kind_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _POINTERS[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"
