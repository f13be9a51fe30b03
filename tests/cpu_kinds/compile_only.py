"""Compiles the fused decoder's pieces for any kind of CPU, and lists their instructions.

``python -m tests.cpu_kinds.compile_only KIND``: compiled code is not run. This checks, unlike emulation, that LLVM
accepts the instructions as they are written.
"""

from __future__ import annotations

import os
import re
import sys
from importlib import import_module

from tests.cpu_kinds.kinds import KINDS

INSTRUCTIONS = {
    "amx": {"ldtilecfg", "tdpbf16ps", "tileloadd", "tilerelease", "tilestored", "tilezero", "vreduceps", "vscalefps"},
    "bfloat16": {"vdpbf16ps", "vcvtne2ps2bf16", "vpermw"},
    "avx512": {"vfmadd231ps"},
}
"""The instructions that compiled pieces must contain, by kind of CPU."""
_ADDRESS, _HALF = "int64", "uint16"
_PIECES = {
    "test_smallest_products._dot": (_HALF, *[_ADDRESS] * 5),
    "test_smallest_products._multiply": (_HALF, *[_ADDRESS] * 6),
    "test_smallest_products._dot_int4": (_HALF, *[_ADDRESS] * 5),
    "test_activation._gated_silu": (_HALF, *[_ADDRESS] * 4),
    "test_split_softmax._weigh": (*[_ADDRESS] * 4, "float32", _ADDRESS, _ADDRESS),
}
"""The compiled functions of the tests, with the types of their arguments."""


def main() -> int:
    kind = KINDS[sys.argv[1]]
    os.environ["NUMBA_CPU_NAME"] = kind.llvm_name
    os.environ["NUMBA_CPU_FEATURES"] = ",".join(f"+{name}" for name in sorted(kind.needs | {"avx2", "fma", "f16c"}))
    if kind.has_tiles:
        import_module("tests.cpu_kinds.emulation").ask_for_tiles()
    found = set()
    for name, arguments in _PIECES.items():
        module, function = name.split(".")
        compiled = getattr(import_module(f"tests.unit.baton.engine.cpu.{module}"), function)
        compiled.compile(f"void({', '.join(arguments)})")
        for code in compiled.inspect_asm().values():
            found |= set(re.findall(r"^\s+([a-z]\w+)", code, re.MULTILINE))
    sys.stdout.write(" ".join(sorted(found)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
