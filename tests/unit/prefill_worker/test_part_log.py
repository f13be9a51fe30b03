"""The log of a hand-off's parts is bounded, and records only real acknowledgements."""

from __future__ import annotations

import pytest

from prefill_worker.part_log import PartLog


def test_a_part_is_acknowledged_when_all_of_it_has_arrived() -> None:
    log = PartLog()
    for size in (100, 50):
        log.sending(size, started_s=1.0)
        log.sent()
    log.acknowledged(99)
    assert [bool(part.acknowledged_s) for part in log.parts()] == [False, False]
    log.acknowledged(100)
    assert [bool(part.acknowledged_s) for part in log.parts()] == [True, False]
    log.acknowledged(150)
    first, second = log.parts()
    assert first.acknowledged_s <= second.acknowledged_s
    assert [part.num_bytes for part in log.parts()] == [100, 50]


def test_an_acknowledgement_can_precede_the_end_of_sending() -> None:
    log = PartLog()
    log.sending(10, started_s=1.0)
    log.acknowledged(10)
    (part,) = log.parts()
    assert part.started_s < part.sent_s == part.acknowledged_s
    log.sent()
    (part,) = log.parts()
    assert part.started_s < part.sent_s == part.acknowledged_s


@pytest.mark.parametrize("limit", [1, 3])
def test_parts_beyond_the_limit_are_merged(limit: int) -> None:
    log = PartLog(limit)
    for number in range(10):
        log.sending(10, started_s=float(number))
        log.sent()
        log.acknowledged((number + 1) * 10)
    parts = log.parts()
    assert len(parts) == limit
    assert sum(part.num_parts for part in parts) == 10
    assert sum(part.num_bytes for part in parts) == 100
    assert all(part.acknowledged_s for part in parts)


def test_a_merged_part_that_grows_is_no_longer_acknowledged() -> None:
    log = PartLog(1)
    for size in (10, 10):
        log.sending(size, started_s=1.0)
        log.sent()
        log.acknowledged(10)
    assert [part.acknowledged_s for part in log.parts()] == [0.0]
