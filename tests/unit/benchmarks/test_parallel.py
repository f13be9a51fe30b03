"""Replays over one process and over several are the same."""

from __future__ import annotations

import pytest

from benchmarks.parallel import mapping


@pytest.mark.parametrize("num_processes", [1, 2])
def test_results_come_in_order(num_processes: int) -> None:
    with mapping(num_processes) as each:
        assert list(each(abs, [-3, 2, -1])) == [3, 2, 1]
