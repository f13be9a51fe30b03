"""Forwards take float32's subnormal numbers for zero, and leave no other trace in the threads that run them."""

from __future__ import annotations

import platform
import subprocess
import sys

import numpy as np
import pytest
import torch
from numba import njit

from baton.core.drafts import Draft, ScheduledSequence
from baton.core.request import Request, SamplingParams
from baton.engine.cpu import emitter
from baton.engine.cpu.nibbles import widen_halves
from baton.engine.cpu.subnormals import ignore_subnormals, restore_subnormals
from baton.engine.models.model_loader import prepare_model
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.runner.options import RunnerOptions
from tests.fused_dtypes import FUSED_DTYPES
from tests.tiny_models import CONFIGS, build_model

X86 = platform.machine() in ("x86_64", "AMD64")
# Helper threads have small stacks: 13 bytes that each forward left there would be too many.
MANY_FORWARDS = """
import threading
import torch
from baton.engine.models.model_loader import prepare_model
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.runner.options import RunnerOptions
from baton.core.request import Request, SamplingParams
from baton.core.drafts import ScheduledSequence
from tests.tiny_models import tiny_model

threading.stack_size(64 * 1024)
torch.set_num_threads(2)
runner = ModelRunner(prepare_model(tiny_model("llama"), "float32"), 4, 16, RunnerOptions(decoder="fused"))
request = Request("a", [5, 6, 7], SamplingParams())
request.block_ids = [0]
batch = runner.build_batch([ScheduledSequence(request, 3)])
for _ in range(5_000):
    runner.forward(batch)
print("done")
"""


def test_the_stack_of_a_helper_thread_does_not_grow() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", MANY_FORWARDS], capture_output=True, text=True, timeout=240, check=False
    )
    assert ended.stdout == "done\n", f"exit status {ended.returncode}: {ended.stderr[-2000:]}"


def _widen_in_a_forward(halves, out, count):
    before = ignore_subnormals()
    for first in range(0, count, 16):
        widen_halves(halves + 2 * first, out + 4 * first)
    restore_subnormals(before)


@pytest.mark.parametrize("has_instruction", [True, False])
def test_small_float16_numbers_are_not_subnormal_in_float32(
    has_instruction: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of float16 are numbers of float32, with the instruction that widens them and without."""
    if not has_instruction:
        monkeypatch.setattr(emitter, "features", frozenset)
    bits = np.arange(0, 1 << 16, dtype=np.uint16)
    halves = bits.view(np.float16)
    out = np.empty(len(bits), dtype=np.float32)
    njit(_widen_in_a_forward)(halves.ctypes.data, out.ctypes.data, len(bits))
    np.testing.assert_array_equal(out, halves.astype(np.float32))


@pytest.mark.skipif(not X86, reason="only x86 has an instruction for pairs of bfloat16 that ignores them")
@pytest.mark.parametrize("dtype", FUSED_DTYPES)
def test_subnormal_sums_are_zero_only_inside_a_forward(dtype: str) -> None:
    """Logits whose terms are all about 1e-40, for one token and for many."""
    model = build_model(CONFIGS["llama"]())
    with torch.no_grad():
        model.model.norm.weight.fill_(1e-20)
        model.lm_head.weight.mul_(1e-20)
    runner = ModelRunner(prepare_model(model.to(getattr(torch, dtype)), dtype), 32, 4, RunnerOptions(decoder="fused"))
    request = Request("a", [5], SamplingParams())
    request.block_ids = list(range(32))
    for length in (0, 1, 4, 16, 70):
        step = ScheduledSequence(request, 1, Draft((7,) * length))
        assert not runner.forward(runner.build_batch([step])).any()
    assert torch.tensor(1e-39) * 1.0 != 0, "this thread is not as it was before"
