"""KV copies between two caches during running steps change no byte and no token."""

from __future__ import annotations

import pytest
import torch

from benchmarks.device_run.copies_part import NUM_INTERLEAVINGS
from benchmarks.device_run.copy_checks import check_interleavings


@pytest.mark.parametrize("seed", range(NUM_INTERLEAVINGS))
def test_imported_kv_equals_exported_kv(seed: int, cuda: torch.device) -> None:
    (row,) = check_interleavings(1, cuda, seed)
    assert row["ok"], row
