"""Products and scores computed in the ways that are meant for other CPUs, as far as this one has their instructions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from engine.fused.emitter import has_features, has_pairs

# What is compiled is decided when it is compiled, so each way needs a process of its own.
RUN = """
import sys
import llvmlite.binding
import pytest
from engine.fused import emitter

way, *tests = sys.argv[1:]
features = frozenset(emitter._features())
if way == "pairs":  # fast where they are slow, slow where they are fast
    name = llvmlite.binding.get_host_cpu_name()
    emitter._SLOW_PAIRS = () if name in emitter._SLOW_PAIRS else (name,)
elif way == "registers":  # as few as CPUs without AVX-512 have
    emitter._most_sums = lambda: 12
elif way == "avx512":
    emitter._features = lambda: features - {"avx512bf16"}
else:
    emitter._features = lambda: frozenset(name for name in features if not name.startswith("avx512"))
chosen = "bfloat16 and (600 or 40 or small or many or all_heads) or numpys"
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *tests, "-k", chosen]))
"""


@pytest.mark.parametrize("way", ["pairs", "registers", "avx512", pytest.param("avx2", marks=pytest.mark.thorough)])
def test_products_are_right_and_rows_independent(way: str) -> None:
    needed = {"registers": "avx512f", "avx512": "avx512f", "avx2": "avx2"}
    if not (has_pairs() if way == "pairs" else has_features(needed[way])):
        pytest.skip(f"this CPU has no {way}")
    tests = [
        str(Path(__file__).with_name(f"test_{name}.py")) for name in ("products", "mixing", "attention_many", "scores")
    ]
    ended = subprocess.run([sys.executable, "-c", RUN, way, *tests], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-1000:]
