"""KV goes from one cache to another beside running steps, and every byte and every token stays what it is."""

from __future__ import annotations

import pytest
import torch

from benchmarks.device_run.copies_part import NUM_INTERLEAVINGS
from benchmarks.device_run.copy_checks import check_interleavings


@pytest.mark.parametrize("seed", range(NUM_INTERLEAVINGS))
def test_imported_kv_equals_exported_kv(seed: int, cuda: torch.device) -> None:
    (row,) = check_interleavings(1, cuda, seed)
    assert row["ok"], row
