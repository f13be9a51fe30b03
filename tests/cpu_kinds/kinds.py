"""The kinds of CPU for which the fused decoder is compiled differently, and how this machine can run as each.

A kind with fewer instructions than this CPU is *masked*: the compiler, torch and oneDNN are configured not to use the
others. A kind with more is *emulated*: code is compiled as for that kind, and functions replace the missing
instructions (:mod:`tests.cpu_kinds.emulation`).
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
    """A kind of CPU.

    Args:
        llvm_name: LLVM's name of a CPU of this kind. The decoder multiplies bfloat16 differently on some CPUs.
        needs: LLVM's names of the instruction sets that define the kind.
        lacks: prefixes of the names of instruction sets that the kind lacks.
        torch_capability, onednn_limit: values of ``ATEN_CPU_CAPABILITY`` and ``ONEDNN_MAX_CPU_ISA``.
        lanes: number of float32 values in a vector register.
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
    """How a CPU with these instruction sets can run as a kind; ``None`` if it cannot."""
    if platform.machine() != "x86_64":
        return None
    if kind.needs <= features:
        masked = any(name.startswith(kind.lacks) for name in features)
        return "masked" if masked else "as it is"
    return "emulated" if features >= _AVX2 else None


def environment_of(kind: CpuKind, features: frozenset[str]) -> dict[str, str]:
    """Environment variables that limit numba, torch and oneDNN to a kind, which they read when they are loaded."""
    variables = {"NUMBA_CPU_NAME": kind.llvm_name}
    if how_to_run(kind, features) == "masked":
        # All sets that LLVM knows are listed, because the named CPU determines the others.
        known = sorted(llvmlite.binding.get_host_cpu_features())
        kept = {name for name in features if not name.startswith(kind.lacks)}
        variables["NUMBA_CPU_FEATURES"] = ",".join(("+" if name in kept else "-") + name for name in known)
        variables["ATEN_CPU_CAPABILITY"] = kind.torch_capability
        variables["ONEDNN_MAX_CPU_ISA"] = kind.onednn_limit
    return variables
