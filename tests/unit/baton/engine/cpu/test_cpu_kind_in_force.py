"""A process that takes on a kind of CPU (see :mod:`tests.cpu_kinds`) makes code for that kind and for no other."""

from __future__ import annotations

import os

import pytest
import torch
from numba import njit

from baton.engine.cpu.emitter import has_fast_pairs, has_pairs, lanes
from baton.engine.cpu.tiles import has_tiles
from baton.engine.models.float32_products import has_bfloat16
from tests.cpu_kinds.kinds import KINDS, host_features, how_to_run
from tests.cpu_kinds.process import VARIABLE

NAME = os.environ.get(VARIABLE)
pytestmark = pytest.mark.skipif(not NAME, reason="this process runs on the CPU as it is")


def test_code_uses_the_instructions_of_the_cpu_kind() -> None:
    kind = KINDS[NAME or ""]
    assert (lanes(), has_pairs(), has_tiles()) == (kind.lanes, kind.has_pairs, kind.has_tiles)
    assert has_fast_pairs() == (NAME in ("amx-fast-pairs", "bfloat16"))


def test_torch_uses_only_the_instructions_of_the_cpu_kind() -> None:
    kind = KINDS[NAME or ""]
    assert has_bfloat16(torch.device("cpu")) == kind.has_pairs
    if how_to_run(kind, host_features()) != "emulated":
        assert torch.backends.cpu.get_cpu_capability().lower() == kind.torch_capability


def test_the_compiler_uses_no_register_beyond_the_cpu_kind() -> None:
    @njit(fastmath=True)
    def total(values):  # type: ignore[no-untyped-def]
        result = values[0]
        for value in values:
            result += value
        return result

    total.compile("float32(float32[::1])")
    [code] = total.inspect_asm().values()
    kind = KINDS[NAME or ""]
    assert ("ymm" in code or "zmm" in code) == (kind.lanes > 4)
    if kind.lanes < 16:
        assert "zmm" not in code
