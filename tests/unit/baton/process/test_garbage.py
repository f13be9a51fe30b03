"""Pauses of a process that others wait for."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest

from baton.process.garbage import rare_collections, spare_pauses


@pytest.fixture(autouse=True)
def untouched_process() -> Iterator[None]:
    thresholds, interval_s = gc.get_threshold(), sys.getswitchinterval()
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()
    sys.setswitchinterval(interval_s)


def test_loaded_objects_are_never_collected_again():
    loaded = [[number] for number in range(1000)]
    frozen_before, youngest_before = gc.get_freeze_count(), gc.get_threshold()[0]
    spare_pauses()
    assert gc.get_freeze_count() >= frozen_before + len(loaded)
    assert gc.get_threshold()[0] > youngest_before


def test_a_thread_that_computes_soon_shortens_the_switch_interval():
    before_s = sys.getswitchinterval()
    spare_pauses()
    assert sys.getswitchinterval() < before_s / 5


def test_a_measurement_leaves_the_collector_settings_unchanged():
    thresholds, frozen = gc.get_threshold(), gc.get_freeze_count()
    with rare_collections():
        assert gc.get_freeze_count() > frozen
        assert gc.get_threshold()[0] > thresholds[0]
    assert gc.get_threshold() == thresholds
    assert gc.get_freeze_count() == 0
