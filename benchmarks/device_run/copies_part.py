"""KV from one cache to another beside running steps, and what such copies move per second: ``--only kv_copies``."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.device_run.copy_checks import check_interleavings
from benchmarks.device_run.copy_rates import measure_rates
from benchmarks.device_run.part import Row, Setting

NUM_INTERLEAVINGS = 30
_NUM_TINY = 4


def run(setting: Setting) -> Iterator[Row]:
    """A row for each interleaving, then rates."""
    count = _NUM_TINY if setting.is_tiny else NUM_INTERLEAVINGS
    yield from check_interleavings(count, setting.device, setting.seed)
    yield from measure_rates(setting.device, setting.is_tiny)
