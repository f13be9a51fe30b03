"""int8 applies on request or when the link is slower than prefill; the measurement covers the link only."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.kv_spec import KVEncoding
from baton.kv_transfer.base import Reservation
from prefill_worker.encoding_choice import BACK_TO_NATIVE, EncodingChoice, Link, Passage, Speed

INT8 = (KVEncoding.INT8,)
MADE = 50e6
"""Bytes per second of the prefill here."""


def auto(link_speed: float | None) -> EncodingChoice:
    choice = EncodingChoice("auto")
    choice.prefill.observe(round(MADE), 1.0)
    if link_speed is not None:
        measure(choice, link_speed)
    return choice


def measure(choice: EncodingChoice, speed: float, seconds: float = 4.0) -> None:
    """Enough to forget what was before."""
    for _ in range(round(seconds / 0.1)):
        choice.link("peer").speed.observe(round(speed * 0.1), 0.1)


def test_the_configured_encoding_is_offered() -> None:
    assert EncodingChoice().offers("peer") == ()
    assert EncodingChoice("native").offers("peer") == ()
    assert EncodingChoice("int8").offers("peer") == INT8


@pytest.mark.parametrize(
    ("speed", "offered"), [(None, ()), (MADE / 2, INT8), (MADE * 0.99, INT8), (MADE * 1.01, ()), (MADE * 40, ())]
)
def test_auto_offers_int8_if_the_link_is_slower_than_prefill(speed: float | None, offered: tuple[()]) -> None:
    choice = auto(speed)
    assert choice.offers("peer") == offered
    assert choice.offers("another peer") == ()


def test_nothing_is_known_before_the_first_prompt() -> None:
    choice = EncodingChoice("auto")
    measure(choice, 1e3)
    assert choice.offers("peer") == ()


def test_a_link_must_be_clearly_faster_before_handoffs_are_native_again() -> None:
    choice = auto(MADE * 0.9)
    assert choice.offers("peer") == INT8
    measure(choice, MADE * 1.1)
    assert choice.offers("peer") == INT8
    measure(choice, MADE * BACK_TO_NATIVE * 1.05)
    assert choice.offers("peer") == ()
    measure(choice, MADE * 1.1)
    assert choice.offers("peer") == ()


def test_shared_memory_uses_int8_only_if_configured() -> None:
    shared, apart = (Reservation(0, encoding=KVEncoding.INT8, shares_memory=shares) for shares in (True, False))
    assert EncodingChoice("auto").encoding(shared) is KVEncoding.NATIVE
    assert EncodingChoice("auto").encoding(apart) is KVEncoding.INT8
    assert EncodingChoice("int8").encoding(shared) is KVEncoding.INT8


def test_shared_memory_does_not_measure_the_link() -> None:
    choice = auto(None)
    passage = choice.passage("peer", Reservation(0, shares_memory=True))
    for part in range(10):
        passage.sending(100)
        passage.acknowledged(100 * part, float(part))
    assert choice.link("peer").speed.bytes_per_second is None


def test_the_speed_is_that_of_the_last_busy_seconds() -> None:
    speed = Speed()
    speed.observe(1000, 0.01)
    assert speed.bytes_per_second is None
    speed.observe(1000, 0.09)
    assert speed.bytes_per_second == pytest.approx(20_000)
    for _ in range(60):
        speed.observe(100, 0.1)
    assert speed.bytes_per_second == pytest.approx(1000, rel=0.1)
    for _ in range(60):
        speed.observe(20_000, 0.1)
    assert speed.bytes_per_second == pytest.approx(200_000, rel=0.1)


@given(st.floats(1e3, 1e9), st.floats(0.0, 5.0), st.integers(2, 40))
def test_a_link_is_measured_without_its_latency(bytes_per_second: float, latency_s: float, num_parts: int) -> None:
    link = Link()
    passage, size = Passage(link), 1_000_000
    for _ in range(num_parts):
        passage.sending(size)
    for part in range(1, num_parts + 1):
        passage.acknowledged(part * size, latency_s + part * size / bytes_per_second)
    passage.close()
    if (num_parts - 1) * size / bytes_per_second > 0.06:
        assert link.speed.bytes_per_second == pytest.approx(bytes_per_second, rel=1e-3)


def test_idle_time_does_not_count() -> None:
    link = Link()
    passage = Passage(link)
    for part in range(1, 100):
        passage.sending(1000)
        passage.acknowledged(part * 1000, float(part))
    assert link.speed.bytes_per_second is None


def test_concurrent_transfers_share_the_link() -> None:
    link = Link()
    both = Passage(link), Passage(link)
    for passage in both:
        for _ in range(20):
            passage.sending(1000)
    for part in range(1, 21):
        for index, passage in enumerate(both):
            passage.acknowledged(part * 1000, part * 0.2 + index * 0.1)
    assert link.speed.bytes_per_second == pytest.approx(10_000)


def test_an_aborted_transfer_leaves_nothing_waiting() -> None:
    link = Link()
    broken, other = Passage(link), Passage(link)
    for _ in range(3):
        broken.sending(1000)
    broken.acknowledged(1000, 1.0)
    broken.close()
    broken.close()
    other.sending(500)
    other.acknowledged(500, 100.0)
    other.sending(500)
    other.acknowledged(1000, 200.0)
    assert link.speed.bytes_per_second is None


def test_links_are_eventually_forgotten() -> None:
    choice = auto(MADE / 2)
    for number in range(1000):
        choice.link(f"peer-{number}")
    assert choice.offers("peer") == ()
    assert len(choice._links) <= 256
