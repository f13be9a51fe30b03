"""Which SLO class a request belongs to, and whether it kept its targets."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import InvalidRequestError, error_classes
from baton.core.outcomes import CANCELLED, FINISHED, REJECTED
from baton.core.slo import BATCH, INTERACTIVE, STANDARD, SloClass, SloClasses, SloResult, judge, target_attributes
from baton.core.timeline import Event, Timeline

GOLD = SloClass("gold", 0.2, 0.01, percentile=99.0, priority=9, queue_deadline_s=0.0)
FLEX = SloClass("flex", 30.0, 1.0, percentile=50.0, priority=-1, queue_deadline_s=60.0)
CLASSES = SloClasses((INTERACTIVE, STANDARD, BATCH, GOLD), "standard", {"flex": "batch", "priority": "gold"})


def timeline(ttft_s: float, decode_s: float) -> Timeline:
    found = Timeline("r")
    for event, at_s in (
        (Event.RECEIVED, 5.0),
        (Event.FIRST_TOKEN, 5.0 + ttft_s),
        (Event.FINISHED, 5 + ttft_s + decode_s),
    ):
        found.record(event, at_s)
    return found


@pytest.mark.parametrize(
    ("header", "tier", "key_class", "expected"),
    [
        (None, None, None, STANDARD),
        (None, None, "batch", BATCH),
        (None, "auto", None, STANDARD),
        (None, "auto", "batch", BATCH),
        (None, "default", "batch", STANDARD),
        (None, "flex", "gold", BATCH),
        (None, "priority", None, GOLD),
        (None, "interactive", "batch", INTERACTIVE),
        ("gold", None, None, GOLD),
        ("gold", "flex", "batch", GOLD),
    ],
)
def test_the_header_overrides_the_tier_and_the_tier_overrides_the_key(header, tier, key_class, expected):
    assert CLASSES.choose(header, tier, key_class) is expected


@pytest.mark.parametrize(
    ("header", "tier"), [("interactiv", None), ("auto", None), (None, "scale"), ("gold", "Flex"), ("", None)]
)
def test_an_unknown_class_is_refused_with_the_known_classes(header, tier):
    with pytest.raises(InvalidRequestError) as caught:
        CLASSES.choose(header, tier)
    assert "interactive, standard, batch, gold" in caught.value.message
    assert caught.value.param == ("service_tier" if tier else "X-Baton-SLO-Class")


def test_the_nearest_class_is_suggested_and_long_names_are_shortened():
    with pytest.raises(InvalidRequestError, match="Did you mean 'interactive'"):
        CLASSES.choose("interactiv", None)
    with pytest.raises(InvalidRequestError) as caught:
        CLASSES.choose("x" * 10_000, None)
    assert len(caught.value.message) < 300


def test_a_configured_tier_overrides_a_class_of_the_same_name():
    classes = SloClasses((STANDARD, BATCH, FLEX), "standard", {"flex": "batch"})
    assert classes.choose(None, "flex") is BATCH
    assert classes.choose("flex", None) is FLEX
    assert SloClasses((STANDARD, FLEX), "standard", {}).choose(None, "flex") is FLEX


@pytest.mark.parametrize(
    ("slo", "asked", "used"),
    [
        (STANDARD, "auto", "default"),
        (STANDARD, "default", "default"),
        (STANDARD, "standard", "standard"),
        (BATCH, "flex", "flex"),
        (BATCH, "batch", "batch"),
        (BATCH, "auto", "flex"),  # by the API key
        (GOLD, "flex", "priority"),  # by the header
        (INTERACTIVE, "auto", "interactive"),
    ],
)
def test_the_response_names_the_tier_that_was_applied(slo, asked, used):
    assert CLASSES.tier_used(slo, asked) == used


@pytest.mark.parametrize(
    ("ttft_s", "tpot_s", "result"),
    [
        (3.0, 0.0625, SloResult.MET),
        (3.5, 0.0625, SloResult.MISSED_TTFT),
        (2.5, 0.125, SloResult.MISSED_TPOT),
        (3.5, 0.125, SloResult.MISSED_BOTH),
    ],
)
def test_both_targets_must_be_met(ttft_s, tpot_s, result):
    verdict = judge(STANDARD, timeline(ttft_s, 8 * tpot_s), "stop", 9)
    assert (verdict.result, verdict.is_met) == (result, result is SloResult.MET)
    assert verdict.ttft_margin_s == pytest.approx(3.0 - ttft_s)
    assert verdict.tpot_margin_s == pytest.approx(0.1 - tpot_s)


def test_a_single_token_cannot_miss_its_tpot():
    verdict = judge(STANDARD, timeline(1.0, 50.0), "length", 1)
    assert (verdict.result, verdict.tpot_margin_s) == (SloResult.MET, None)
    assert verdict.attributes() == {"slo_result": "met", "slo_ttft_margin_ms": 2000.0}


@pytest.mark.parametrize(
    ("outcome", "result", "is_met"),
    [
        (REJECTED, SloResult.REJECTED, False),
        ("overloaded", SloResult.REJECTED, False),
        ("deadline_exceeded", SloResult.FAILED, False),
        ("worker_lost", SloResult.FAILED, False),
        ("internal_error", SloResult.FAILED, False),
        (CANCELLED, SloResult.EXCLUDED, None),
        ("request_cancelled", SloResult.EXCLUDED, None),
        ("context_length_exceeded", SloResult.EXCLUDED, None),
    ],
)
def test_failures_and_rejections_are_misses_but_cancellations_are_not(outcome, result, is_met):
    verdict = judge(STANDARD, timeline(0.1, 0.1), outcome, 5)
    assert (verdict.result, verdict.is_met) == (result, is_met)
    assert verdict.attributes() == {"slo_result": str(result)}


def test_every_finish_reason_has_a_verdict():
    for outcome in (*FINISHED, CANCELLED, REJECTED, *error_classes()):
        assert judge(STANDARD, timeline(0.1, 0.1), outcome, 5).result in SloResult


@given(ttft_s=st.floats(0, 1e4), tpot_s=st.floats(0, 1e2), num_tokens=st.integers(2, 10_000))
def test_the_verdict_is_met_exactly_when_no_margin_is_negative(ttft_s, tpot_s, num_tokens):
    verdict = judge(BATCH, timeline(ttft_s, tpot_s * (num_tokens - 1)), "stop", num_tokens)
    assert verdict.ttft_margin_s is not None
    assert verdict.tpot_margin_s is not None
    assert verdict.is_met == (min(verdict.ttft_margin_s, verdict.tpot_margin_s) >= 0)
    assert math.isclose(verdict.ttft_margin_s, BATCH.ttft_s - ttft_s, abs_tol=1e-6)


def test_targets_are_in_milliseconds():
    assert target_attributes(GOLD) == {"slo_class": "gold", "slo_ttft_target_ms": 200.0, "slo_tpot_target_ms": 10.0}
