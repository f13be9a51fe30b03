"""``prefill.niceness``: ``auto`` yields only where prompts are short, and a number applies as given."""

from __future__ import annotations

import pytest

from cluster.config.worker_config import PrefillConfig
from prefill_worker.niceness import pick_niceness

DEFAULT = PrefillConfig().niceness


@pytest.mark.parametrize(("has_tiles", "expected"), [(True, 10), (False, 0)])
def test_by_default_prefill_lowers_its_priority_with_a_matrix_unit(has_tiles: bool, expected: int) -> None:
    assert pick_niceness(DEFAULT, on_cpu=True, has_tiles=has_tiles) == expected


@pytest.mark.parametrize("has_tiles", [True, False])
def test_a_configured_niceness_applies_only_on_cpus(has_tiles: bool) -> None:
    assert pick_niceness(3, on_cpu=True, has_tiles=has_tiles) == 3
    assert pick_niceness(3, on_cpu=False, has_tiles=has_tiles) == 0
    assert pick_niceness(DEFAULT, on_cpu=False, has_tiles=has_tiles) == 0
