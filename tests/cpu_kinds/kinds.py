"""The kinds of CPU for which the fused decoder is compiled differently, and how this machine can stand in for each.

A kind that has less than this CPU is *masked*: the compiler, torch and oneDNN are told not to use the rest. A kind that
has more is *emulated*: code is made as for that kind, and functions take the place of the instructions that are missing
here (:mod:`tests.cpu_kinds.emulation`).
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass

import llvmlite.binding

_AVX512 = frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})
_BFLOAT16 = _AVX512 | {"avx512bf16"}
_AMX = _BFLOAT16 | {"amx-tile", "amx-bf16"}
_AVX2 = frozenset({"avx", "avx2", "fma", "f16c"})
_ALL_AVX = ("avx", "fma", "f16c", "vaes", "vpclmulqdq", "xop")


@dataclass(frozen=True)
class CpuKind:
    """What code may be made of.

    Args:
        llvm_name: a CPU of the kind as LLVM calls it. The decoder multiplies bfloat16 in other ways on some of them.
        needs: LLVM's names of the instruction sets that make the kind.
        lacks: how the names of sets begin that the kind does not have.
        torch_capability, onednn_limit: values of ``ATEN_CPU_CAPABILITY`` and ``ONEDNN_MAX_CPU_ISA``.
        lanes: float32 values in a vector register.
    """

    llvm_name: str
    needs: frozenset[str]
    lacks: tuple[str, ...]
    torch_capability: str
    onednn_limit: str
    lanes: int

    @property
    def has_pairs(self) -> bool:
        """Whether an instruction multiplies pairs of bfloat16."""
        return "avx512bf16" in self.needs

    @property
    def has_tiles(self) -> bool:
        """Whether there is a matrix unit."""
        return "amx-bf16" in self.needs


KINDS: Mapping[str, CpuKind] = {
    "amx": CpuKind("sapphirerapids", _AMX, (), "avx512", "ALL", 16),
    "amx-fast-pairs": CpuKind("graniterapids", _AMX, (), "avx512", "ALL", 16),
    "bfloat16": CpuKind("znver4", _BFLOAT16, ("amx", "avx512fp16"), "avx512", "AVX512_CORE_BF16", 16),
    "avx512": CpuKind(
        "cascadelake", _AVX512, ("amx", "avx512fp16", "avx512bf16", "avx10"), "avx512", "AVX512_CORE", 16
    ),
    "avx2": CpuKind("znver3", _AVX2, ("amx", "avx512", "avx10"), "avx2", "AVX2", 8),
    "sse": CpuKind("nehalem", frozenset(), ("amx", *_ALL_AVX), "default", "SSE41", 4),
}


def host_features() -> frozenset[str]:
    """LLVM's names of this CPU's instruction sets."""
    return frozenset(name for name, present in llvmlite.binding.get_host_cpu_features().items() if present)


def how_to_run(kind: CpuKind, features: frozenset[str]) -> str | None:
    """How a CPU with these instruction sets stands in for a kind; None: it cannot."""
    if platform.machine() != "x86_64":
        return None
    if kind.needs <= features:
        masked = any(name.startswith(kind.lacks) for name in features)
        return "masked" if masked else "as it is"
    return "emulated" if features >= _AVX2 else None


def environment_of(kind: CpuKind, features: frozenset[str]) -> dict[str, str]:
    """Variables that tell numba, torch and oneDNN to make do with a kind. They read them when they are loaded."""
    variables = {"NUMBA_CPU_NAME": kind.llvm_name}
    if how_to_run(kind, features) == "masked":
        # All sets that LLVM knows are named, since those that are not would be the named CPU's.
        known = sorted(llvmlite.binding.get_host_cpu_features())
        kept = {name for name in features if not name.startswith(kind.lacks)}
        variables["NUMBA_CPU_FEATURES"] = ",".join(("+" if name in kept else "-") + name for name in known)
        variables["ATEN_CPU_CAPABILITY"] = kind.torch_capability
        variables["ONEDNN_MAX_CPU_ISA"] = kind.onednn_limit
    return variables
