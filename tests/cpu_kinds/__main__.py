"""Runs the tests that depend on the CPU's instructions once as each kind, and says which kinds ran.

``python -m tests.cpu_kinds [--kinds amx avx512] [--pieces]``; the exit status is 1 if a test failed on any kind.
"""

from __future__ import annotations

import argparse
import sys
import time

from tests.cpu_kinds.kinds import KINDS
from tests.cpu_kinds.run import run_as

_FUSED = "tests/unit/baton/engine/cpu"
PIECES = [
    *(
        f"{_FUSED}/test_{name}.py"
        for name in (
            "cpu_kind_in_force", "activation", "attention_few", "attention_many", "mixing", "products", "scores",
            "softmax", "split_softmax", "tiles", "smallest_products",
        )
    ),
    "tests/unit/baton/engine/models/test_float32_products.py",
    "tests/unit/benchmarks/test_ceilings.py",
]  # fmt: skip
"""Tests of functions that are compiled separately."""
PROGRAMS = [
    *(f"{_FUSED}/test_{name}.py" for name in ("decoder", "int8_cache", "quantization", "subnormals")),
    "tests/unit/baton/engine/draft/eagle/test_eagle_head.py",
    "tests/unit/baton/engine/test_niceness.py",
    "tests/unit/baton/engine/runner/test_served_model.py",
    "tests/unit/baton/engine/test_encoding_check.py",
    "tests/unit/baton/engine/draft/test_loading.py",
]
"""Tests of the whole program, which takes minutes to compile for each kind, once per machine."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cpu_kinds", description=__doc__)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="default: all")
    parser.add_argument("--pieces", action="store_true", help="leave out what needs the whole program")
    arguments = parser.parse_args()
    tests = PIECES if arguments.pieces else [*PIECES, *PROGRAMS]
    runs = []
    for name in arguments.kinds:
        began_s = time.monotonic()
        run = run_as(name, tests)
        runs.append(run)
        sys.stdout.write(
            f"{run.line}  ({time.monotonic() - began_s:.0f} s)\n" + ("" if run.is_good else run.output + "\n")
        )
        sys.stdout.flush()
    sys.stdout.write("\nCPU kinds:\n" + "".join(f"  {run.line}\n" for run in runs))
    return 0 if all(run.is_good for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
