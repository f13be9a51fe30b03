"""Room, margins, waits and gathering: the pure parts of admission."""

from __future__ import annotations

import random
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.request import FinishReason, SamplingParams
from baton.core.slo import INTERACTIVE, SloClass
from baton.core.timeline import Event, Timeline
from cluster.admission import tuning
from cluster.admission.admission_config import AdmissionConfig
from cluster.admission.admitted import AdmittedWork, ClassMargins, SafetyMargin
from cluster.admission.batching_delay import ArrivalGaps, BatchingDelay, BatchingView, batching_delay_ms
from cluster.admission.refusals import no_room
from cluster.admission.room import Factors, Shortage, check_room
from cluster.admission.waiting_time import Blockage, WorkInProgress
from cluster.latency.estimates import WorkerTraits
from cluster.latency.latency_model import LatencyModel
from cluster.requests.generation import GenerationRequest
from cluster.requests.request_record import RequestRecord
from cluster.routing.routing_contracts import RouteDecision

NO_MARGIN = Factors()
milliseconds = st.floats(0.1, 1e5)


def decision(ttft_ms: float, tpot_ms: float, *, idle_ttft_ms: float = 1.0, idle_tpot_ms: float = 1.0) -> RouteDecision:
    return RouteDecision("p", "d", 0, ttft_ms, tpot_ms, idle_ttft_ms, idle_tpot_ms, wait_ms=ttft_ms - idle_ttft_ms)


@given(
    milliseconds, milliseconds, milliseconds, st.floats(1, tuning.LARGEST_MARGIN), st.floats(1, tuning.LARGEST_MARGIN)
)
def test_a_request_that_fits_an_idle_cluster_has_room(
    idle_ttft_ms: float, idle_tpot_ms: float, elapsed_ms: float, ttft_factor: float, tpot_factor: float
) -> None:
    idle = decision(elapsed_ms + idle_ttft_ms, idle_tpot_ms, idle_ttft_ms=idle_ttft_ms, idle_tpot_ms=idle_tpot_ms)
    factors = Factors(ttft_factor, tpot_factor)
    check = check_room(idle, INTERACTIVE, elapsed_ms, slack=0.01, factors=factors, max_tokens=9)
    assert check.shortage is None
    assert check.ttft_target_ms >= INTERACTIVE.ttft_s * 1e3


@pytest.mark.parametrize(
    ("ttft_ms", "tpot_ms", "residents_ms", "max_tokens", "shortage"),
    [
        (999, 49, inf, 9, None),
        (1001, 49, inf, 9, Shortage.PREFILL),
        (999, 51, inf, 9, Shortage.DECODE),
        (999, 49, 48, 9, Shortage.DECODE),
        (999, 51, inf, 1, None),
        (1001, 51, inf, 9, Shortage.PREFILL),
    ],
)
def test_room_requires_meeting_both_targets(ttft_ms, tpot_ms, residents_ms, max_tokens, shortage) -> None:
    check = check_room(
        decision(ttft_ms, tpot_ms),
        INTERACTIVE,
        0.0,
        0.5,
        NO_MARGIN,
        max_tokens=max_tokens,
        residents_tpot_ms=residents_ms,
    )
    assert check.shortage is shortage


def test_a_margin_applies_to_the_remaining_and_not_the_elapsed_time() -> None:
    half = Factors(ttft=2.0)
    late = check_room(decision(799, 1), INTERACTIVE, 600.0, 0.5, half, max_tokens=9)
    assert late.shortage is None  # 600 + 400 / 2 = 800
    assert check_room(decision(801, 1), INTERACTIVE, 600.0, 0.5, half, max_tokens=9).shortage is Shortage.PREFILL


def test_a_lost_target_is_replaced_by_what_is_possible() -> None:
    late = check_room(decision(5140, 1, idle_ttft_ms=100), INTERACTIVE, 5000.0, 0.5, NO_MARGIN, max_tokens=9)
    assert late.shortage is None
    assert late.is_lost
    assert late.ttft_target_ms == 5150
    busy = check_room(decision(5160, 1, idle_ttft_ms=100), INTERACTIVE, 5000.0, 0.5, NO_MARGIN, max_tokens=9)
    assert busy.shortage is Shortage.PREFILL
    assert busy.over_ms == pytest.approx(10)


@pytest.mark.parametrize(
    ("ttft_ms", "idle_ttft_ms", "shows_crowd"),
    [(1034, 990, False), (1600, 990, True), (1034, 300, True), (900, 300, False), (1700, 1100, False)],
    ids=["hardly waits", "waits long", "time to spare", "in time", "lost"],
)
def test_a_request_that_is_late_even_alone_shows_no_crowd(
    ttft_ms: float, idle_ttft_ms: float, shows_crowd: bool
) -> None:
    check = check_room(decision(ttft_ms, 1, idle_ttft_ms=idle_ttft_ms), INTERACTIVE, 0.0, 0.5, NO_MARGIN, max_tokens=9)
    assert check.shows_crowd is shows_crowd


def test_a_lost_request_needs_no_margin() -> None:
    """Regression: with a margin, a dozen requests waited for a worker that could have met their TPOT target."""
    double = Factors(ttft=2.0, tpot=2.0)
    in_time = check_room(decision(100, 40), INTERACTIVE, 0.0, 0.5, double, max_tokens=9)
    assert in_time.shortage is Shortage.DECODE  # 50 / 2 = 25
    lost = check_room(decision(5140, 40, idle_ttft_ms=100), INTERACTIVE, 5000.0, 0.5, double, max_tokens=9)
    assert lost.shortage is None
    assert lost.allowed_tpot_ms == 50
    slower = check_room(decision(5140, 51, idle_ttft_ms=100), INTERACTIVE, 5000.0, 0.5, double, max_tokens=9)
    assert slower.shortage is Shortage.DECODE


@pytest.mark.parametrize(("elapsed_ms", "learns"), [(0.0, True), (5000.0, False)], ids=["in time", "lost"])
def test_margins_learn_only_from_requests_that_could_meet_their_targets(elapsed_ms: float, learns: bool) -> None:
    work = AdmittedWork([INTERACTIVE])
    timeline = Timeline("r1")
    for at_s, event in ((0.0, Event.RECEIVED), (6.0, Event.FIRST_TOKEN), (7.0, Event.FINISHED)):
        timeline.record(event, at_s)  # misses both
    record = RequestRecord(
        GenerationRequest("r1", (1, 2, 3), SamplingParams(max_tokens=9), timeline, slo=INTERACTIVE), 60.0
    )
    record.attempt, record.finish_reason = 1, FinishReason.STOP
    route = RouteDecision(None, "decode-1", 0, elapsed_ms + 100, 40.0, 100.0, 1.0)
    check = check_room(route, INTERACTIVE, elapsed_ms, 0.5, NO_MARGIN, max_tokens=9)
    before = work.factors(INTERACTIVE)
    work.dispatched(record, route, check, 0.0, had_room=True)
    record.token_ids.extend([4, 5, 6])
    work.ended(record, 7.0)
    after = work.factors(INTERACTIVE)
    assert (after.tpot > before.tpot, after.ttft > before.ttft) == (learns, learns)


def test_a_lost_request_has_no_room_in_a_crowd() -> None:
    lost = decision(1200, 1, idle_ttft_ms=1100)  # beyond a second, even alone
    assert check_room(lost, INTERACTIVE, 0.0, 0.5, NO_MARGIN, max_tokens=9).shortage is None
    crowded = check_room(lost, INTERACTIVE, 0.0, 0.5, NO_MARGIN, max_tokens=9, is_crowded=True)
    assert crowded.is_lost
    assert crowded.shortage is Shortage.PREFILL
    idle = check_room(lost, INTERACTIVE, 0.0, 0.5, NO_MARGIN, max_tokens=9, is_crowded=True, is_idle=True)
    assert idle.shortage is None
    kept = check_room(decision(950, 1), INTERACTIVE, 0.0, 0.5, NO_MARGIN, max_tokens=9, is_crowded=True)
    assert kept.shortage is None


@pytest.mark.parametrize(
    ("ttft_ms", "idle_ttft_ms", "factor", "is_crowded", "told"),
    [
        (
            1200,
            500,
            1.0,
            False,
            "predicted TTFT is 1200 ms, and the target of the SLO class 'interactive' is 1000 ms. Capacity",
        ),
        (
            960,
            500,
            1.25,
            False,
            "the target of the SLO class 'interactive' is 1000 ms (800 ms with the prediction margin",
        ),
        (1900, 1200, 1.0, False, "No route would meet the target of the SLO class 'interactive', and"),
        (1300, 1200, 1.0, True, "and requests that can meet their targets leave no capacity"),
    ],
)
def test_a_refusal_states_what_the_prediction_was_compared_with(
    ttft_ms, idle_ttft_ms, factor, is_crowded, told
) -> None:
    busy = decision(ttft_ms, 1, idle_ttft_ms=idle_ttft_ms)
    check = check_room(busy, INTERACTIVE, 0.0, 0.5, Factors(ttft=factor), max_tokens=9, is_crowded=is_crowded)
    error = no_room(INTERACTIVE, check, busy, wait_s=2.0, allowed_s=0.0)
    assert told in error.message
    assert error.reason == "prefill"


@pytest.mark.parametrize(
    ("wait_s", "allowed_s", "told"),
    [
        (2.04, 0.0, "in about 2 s, but this request does not wait"),
        (0.0, 0.0, "in less than 0.1 s, but this request does not wait"),
        (0.04, 0.02, "in less than 0.1 s, but this request may wait for less than 0.1 s only"),
        (31.26, 30.0, "in about 31.3 s, but this request may wait for 30 s only"),
    ],
)
def test_a_refusal_states_waits_that_are_no_zeros(wait_s: float, allowed_s: float, told: str) -> None:
    check = check_room(decision(1900, 1), INTERACTIVE, 0.0, 0.5, Factors(), max_tokens=9)
    error = no_room(INTERACTIVE, check, decision(1900, 1), wait_s=wait_s, allowed_s=allowed_s)
    assert f"Capacity is expected {told}" in error.message


@given(milliseconds, milliseconds, st.floats(0, 1000), st.floats(1, tuning.LARGEST_MARGIN))
def test_an_achievable_target_is_never_given_up(
    ttft_ms: float, idle_ttft_ms: float, elapsed_ms: float, factor: float
) -> None:
    busy = decision(elapsed_ms + ttft_ms, 1, idle_ttft_ms=idle_ttft_ms)
    check = check_room(busy, INTERACTIVE, elapsed_ms, 0.5, Factors(ttft=factor), max_tokens=9)
    if check.shortage is None and not check.is_lost:
        assert busy.ttft_ms <= INTERACTIVE.ttft_s * 1e3


@pytest.mark.parametrize("percentile", [80.0, 95.0, 99.0])
@pytest.mark.parametrize("sd", [0.05, 0.3])
def test_a_margin_converges_to_the_wanted_share(percentile: float, sd: float) -> None:
    """Predictions are too low in the median, and every admitted request is predicted at its limit."""
    rng = random.Random(1)
    margin = SafetyMargin(1 - percentile / 100)
    kept = []
    for _ in range(20_000):
        used = margin.factor
        hit = rng.lognormvariate(0.3, sd) <= used
        kept.append(hit)
        margin.observe(used, kept=hit)
    share = sum(kept[5000:]) / len(kept[5000:])
    assert share >= percentile / 100 - 0.02
    assert share <= percentile / 100 + 0.03 or margin.factor == 1.0


@pytest.mark.parametrize("seed", range(8))
def test_a_class_meets_its_share_within_some_hundred_requests(seed: int) -> None:
    """The target holds over short runs too, because the margin aims a little above it."""
    rng = random.Random(seed)
    margins = ClassMargins(SloClass("c", 1, 1, 95.0, 0, 0))
    kept = []
    for _ in range(1500):
        hits = [rng.lognormvariate(0.1, 0.15) <= margin.factor for margin in (margins.ttft, margins.tpot)]
        for margin, hit in zip((margins.ttft, margins.tpot), hits, strict=True):
            margin.observe(margin.factor, kept=hit)
        kept.append(all(hits))
    assert sum(kept[500:]) / len(kept[500:]) >= 0.95


def test_a_margin_is_bounded_and_simultaneous_misses_count_once() -> None:
    margin = SafetyMargin(0.025)
    first = margin.factor
    for _ in range(1000):
        margin.observe(first, kept=False)  # all of them were let in before the first was heard of
    assert margin.factor < 1.5 * first
    for _ in range(1000):
        margin.observe(margin.factor, kept=False)
    assert margin.factor == tuning.LARGEST_MARGIN
    for _ in range(100_000):
        margin.observe(margin.factor, kept=True)
    assert margin.factor == 1.0


def test_a_stricter_percentile_starts_with_more_margin() -> None:
    def first(percentile: float) -> float:
        return ClassMargins(SloClass("c", 1, 1, percentile, 0, 0)).factors.ttft

    assert 1 < first(50) < first(95) < first(99) <= first(100)


PROMPTS = Blockage(Shortage.PREFILL, over_ms=500, wait_ms=2000, tpot_ms=50, num_prompts=20, num_sequences=50)
DECODES = Blockage(Shortage.DECODE, wait_ms=0, tpot_ms=50, num_prompts=0, num_sequences=50)


def test_waits_are_predicted_from_running_work() -> None:
    work = WorkInProgress(num_sequences=50, max_tokens=50 * 1000)
    for _ in range(500):
        work.observe_stay(5.0)
    assert work.wait_s(PROMPTS, num_ahead=20, mean_max_tokens=1000) == pytest.approx(2.5)  # ten prompts a second
    assert work.wait_s(DECODES, num_ahead=0, mean_max_tokens=1000) == pytest.approx(0.1)  # ten sequences a second
    assert work.wait_s(DECODES, num_ahead=20, mean_max_tokens=1000) == pytest.approx(2.1)


def test_a_stay_is_no_longer_than_the_most_tokens_take() -> None:
    work = WorkInProgress(num_sequences=50, max_tokens=50 * 1000)
    work.observe_stay(40.0)  # of other requests, with long answers
    assert work.wait_s(DECODES, num_ahead=100, mean_max_tokens=20) == pytest.approx(40 / 50 + 100 * 1.0 / 50)


def test_the_work_of_the_moment_of_a_blockage_counts() -> None:
    """Later there may be less, whose wait is shorter."""
    work = WorkInProgress(num_prompts=1, num_sequences=1, max_tokens=100)
    assert work.wait_s(PROMPTS, num_ahead=20, mean_max_tokens=100) == pytest.approx(2.5)


GATHERS = AdmissionConfig()
FOR_THROUGHPUT = AdmissionConfig(gather_for="throughput")
PAYS = BatchingView(slack_ms=500, gap_ms=1, fixed_ms=20, own_ms=2, room_tokens=480, prompt_tokens=32)


def test_batching_pays_for_short_prompts_at_a_high_rate() -> None:
    assert 1 <= batching_delay_ms(PAYS, GATHERS) <= GATHERS.gather_ms


@pytest.mark.parametrize(
    "change",
    [
        {"slack_ms": 1.0},
        {"gap_ms": 50.0},
        {"gap_ms": GATHERS.gather_ms + 1, "fixed_ms": 60.0},  # no other request would arrive before it starts
        {"own_ms": 30.0},
        {"room_tokens": 16},
        {"wait_ms": 3.0},
        {"idle_workers": 1},
    ],
)
def test_batching_is_off_when_it_does_not_pay(change: dict[str, float]) -> None:
    view = BatchingView(**{**{name: getattr(PAYS, name) for name in PAYS.__slots__}, **change})
    assert batching_delay_ms(view, GATHERS) == 0.0


def test_the_limits_of_batching_are_settings() -> None:
    assert batching_delay_ms(PAYS, AdmissionConfig(gather_ms=2.0)) == 2.0
    assert batching_delay_ms(PAYS, AdmissionConfig(gather_share=0.01)) == 5.0
    assert batching_delay_ms(PAYS, AdmissionConfig(gather_share=0.0)) == 0.0


def test_throughput_first_holds_prompts_that_only_save_a_step() -> None:
    view = BatchingView(slack_ms=500, gap_ms=8, fixed_ms=10, own_ms=4, room_tokens=480, prompt_tokens=32)
    assert batching_delay_ms(view, GATHERS) == 0.0
    assert batching_delay_ms(view, FOR_THROUGHPUT) == FOR_THROUGHPUT.gather_ms
    for change in ({"wait_ms": 3.0}, {"idle_workers": 1}, {"room_tokens": 16}, {"slack_ms": 60.0}, {"gap_ms": 21.0}):
        assert batching_delay_ms(replace(view, **change), FOR_THROUGHPUT) == 0.0


@given(
    st.floats(-10, 1e4),
    st.floats(0, 100),
    st.floats(0, 100),
    st.floats(0, 100),
    st.integers(-100, 4000),
    st.integers(1, 4000),
)
def test_batching_never_costs_more_than_it_gains(slack, gap, fixed, own, room, tokens) -> None:
    hold = batching_delay_ms(BatchingView(slack, gap, fixed, own, room, tokens), GATHERS)
    assert 0 <= hold <= GATHERS.gather_ms
    if hold:
        assert hold <= 0.1 * slack
        assert hold <= (fixed - own) / 2
        assert hold >= gap


def test_gaps_track_bursts_and_forget_them() -> None:
    gaps = ArrivalGaps()
    for number in range(20):
        gaps.observe(number * 0.001)
    assert gaps.gap_ms < 5
    gaps.observe(10.0)
    assert gaps.gap_ms > 500


def never_computing(worker_id: str) -> bool:
    return False


def test_the_batching_view_comes_from_the_latency_model() -> None:
    model = LatencyModel()
    model.add_worker("p", WorkerTraits(("prefill",), 512), prior=(20.0, 0.02, 1e-6, 0.1, 1e-4, 0.1))
    batching_delay = BatchingDelay(model, lambda: {"p": 512}, GATHERS)
    for number in range(20):
        batching_delay.arrived(number * 0.001)
    idle = RouteDecision("p", "d", 0, 25.0, 10.0, idle_ttft_ms=25.0, idle_tpot_ms=10.0)
    assert batching_delay.delay_ms(idle, 32, slack_ms=900, computes_prompts=never_computing) > 0
    assert batching_delay.delay_ms(idle, 32, slack_ms=900, computes_prompts=never_computing, delayed_tokens=500) == 0
    busy = RouteDecision("p", "d", 0, 25.0, 10.0, idle_ttft_ms=25.0, idle_tpot_ms=10.0, wait_ms=5.0)
    assert batching_delay.delay_ms(busy, 32, slack_ms=900, computes_prompts=never_computing) == 0
    two = BatchingDelay(model, lambda: {"p": 512, "q": 512}, GATHERS)
    for number in range(20):
        two.arrived(number * 0.001)
    assert two.delay_ms(idle, 32, slack_ms=900, computes_prompts=never_computing) == 0
    assert two.delay_ms(idle, 32, slack_ms=900, computes_prompts=lambda worker_id: worker_id == "p") == 0
    assert two.delay_ms(idle, 32, slack_ms=900, computes_prompts=lambda worker_id: worker_id == "q") > 0
