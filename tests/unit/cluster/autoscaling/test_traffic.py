"""The traffic meter: rates, sizes, cache hits, and the difference between swings and chance."""

from __future__ import annotations

import random

import pytest

from baton.core.slo import BATCH, INTERACTIVE
from cluster.autoscaling.traffic import KnownTraffic, TrafficMeter
from tests.request_records import make_record


class Traffic:
    """A meter with a clock that the test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.meter = TrafficMeter(lambda: self.now_s)

    def arrive(self, seconds: float, rate: float, prompt: int = 100, slo=INTERACTIVE) -> None:
        """Evenly."""
        for _ in range(round(seconds * rate)):
            self.now_s += 1 / rate
            self.meter.arrived(make_record(prompt, slo))

    def end(
        self, prompt: int = 100, cached: int = 0, output: int = 10, accepted: int = 0, slo=INTERACTIVE, local=False
    ):
        record = make_record(prompt, slo, num_output_tokens=output, num_cached_tokens=cached)
        record.num_accepted = accepted
        if not local:
            record.timeline.attributes["prefill_worker"] = "prefill-1"
        self.meter.ended(record)

    @property
    def rate(self) -> float:
        return self.meter.seen().demand().rate


def test_without_requests_there_is_no_demand():
    traffic = Traffic()
    traffic.now_s += 100
    asked = traffic.meter.seen().demand()
    assert (asked.rate, asked.num_requests, asked.seen_s) == (0.0, 0, 100.0)


def test_a_steady_rate_is_measured_by_class_and_size():
    traffic = Traffic()
    for _ in range(60):
        traffic.arrive(0.5, 8, prompt=100)
        traffic.arrive(0.5, 4, prompt=1000)
        traffic.meter.arrived(make_record(5000, BATCH))
    interactive, batch = traffic.meter.seen().demand().classes
    assert interactive.rate == pytest.approx(6, rel=0.05)
    assert {round(group.uncached_tokens): round(group.share, 2) for group in interactive.prompts} == {
        100: pytest.approx(0.67, abs=0.02),
        1000: pytest.approx(0.33, abs=0.02),
    }
    assert (batch.slo, batch.prompt_tokens) == (BATCH, 5000)
    assert batch.rate == pytest.approx(1, rel=0.05)


def test_the_mix_is_that_of_five_minutes_at_the_present_rate():
    traffic = Traffic()
    assert traffic.meter.seen().mix().rate == 0
    traffic.arrive(180, 0.5, prompt=1000)  # 90 requests
    traffic.end(prompt=1000, output=100)
    traffic.arrive(60, 0.25, prompt=100)  # 15
    traffic.end(prompt=100, output=10)
    seen = traffic.meter.seen()
    mix = seen.mix()
    assert mix.rate == pytest.approx(seen.demand().rate)
    assert mix.rate == pytest.approx(0.25, rel=0.1)
    assert mix.num_requests == 105
    assert mix.classes[0].prompt_tokens == pytest.approx((90 * 1000 + 15 * 100) / 105, rel=0.01)
    assert mix.classes[0].output_tokens == 55
    traffic.now_s += 120
    assert traffic.meter.seen().mix().rate == 0  # there is no advice then


def test_the_first_seconds_give_no_rate():
    traffic = Traffic()
    traffic.arrive(0.5, 40)
    assert traffic.rate <= 2.0


@pytest.mark.parametrize("factor", [4.0, 0.25])
def test_a_swing_is_detected_after_ten_seconds(factor):
    traffic = Traffic()
    traffic.arrive(120, 20)
    assert traffic.rate == pytest.approx(20, rel=0.05)
    traffic.arrive(11, 20 * factor)
    assert traffic.rate == pytest.approx(20 * factor, rel=0.15)


def test_a_swing_of_prompt_lengths_is_detected():
    traffic = Traffic()
    traffic.arrive(120, 20, prompt=200)
    traffic.arrive(10, 20, prompt=800)
    assert traffic.meter.seen().demand().classes[0].prompt_tokens > 700


def test_silence_gives_a_rate_of_zero():
    traffic = Traffic()
    traffic.arrive(120, 5)
    traffic.now_s += 12
    assert traffic.rate == 0.0


def test_random_fluctuation_is_not_a_swing():
    chance, traffic, seen = random.Random(3), Traffic(), []
    for second in range(1800):
        until_s = traffic.now_s + 1
        at_s = traffic.now_s + chance.expovariate(10)
        while at_s < until_s:
            traffic.now_s = at_s
            traffic.meter.arrived(make_record(100, INTERACTIVE))
            at_s += chance.expovariate(10)
        traffic.now_s = until_s
        if second > 60 and second % 5 == 0:
            seen.append(traffic.rate)
    outside = [rate for rate in seen if not 8 <= rate <= 12]
    assert len(outside) <= len(seen) * 0.02


def test_answers_and_cache_hits_are_measured_by_class():
    traffic = Traffic()
    traffic.arrive(30, 2)
    traffic.arrive(30, 2, slo=BATCH)
    for _ in range(30):
        traffic.end(cached=75, output=50)
        traffic.end(output=200, slo=BATCH)
    interactive, batch = traffic.meter.seen().demand().classes
    assert (interactive.output_tokens, batch.output_tokens) == (50, 200)
    assert interactive.prompts[0].cached_tokens == pytest.approx(75)
    assert interactive.prompts[0].uncached_tokens == pytest.approx(25)
    assert batch.prompts[0].cached_tokens == 0


def test_the_local_share_counts_uncached_tokens():
    traffic = Traffic()
    for _ in range(10):
        traffic.end(prompt=900)
        traffic.end(prompt=200, cached=100, local=True)
    assert traffic.meter.seen().demand().local_share == pytest.approx(0.1)
    for _ in range(80):
        traffic.end(prompt=900, local=True)
    assert traffic.meter.seen().demand().local_share == pytest.approx(0.9, abs=0.01)


def test_requests_that_never_started_count_only_as_demand():
    traffic = Traffic()
    traffic.arrive(20, 5)
    traffic.end(output=0)
    assert traffic.rate == pytest.approx(5, rel=0.1)
    assert traffic.meter.seen().summary()["output_tokens_per_s"] == 0.0


def test_old_requests_are_forgotten_and_memory_is_bounded():
    traffic = Traffic()
    for _ in range(50):
        traffic.arrive(20, 1)
        traffic.end()
        traffic.now_s += 10
    assert len(traffic.meter._seconds) <= 301
    traffic.now_s += 1000
    assert traffic.meter.seen().demand().num_requests == 0
    assert len(traffic.meter._seconds) == 0


class TestLoad:
    def sampled(self, loads) -> tuple[float, float]:
        traffic = Traffic()
        for load in loads:
            traffic.now_s += 1
            traffic.meter.sample_load("decode", load)
        return traffic.meter.load("decode")

    def test_without_samples_there_is_no_load(self):
        assert Traffic().meter.load("prefill") == (0.0, 0.0)

    def test_the_load_is_the_mean_of_the_last_seconds(self):
        assert self.sampled([100.0] * 20 + [10.0] * 15) == (pytest.approx(10.0), 0.0)

    def test_growth_is_reported_when_it_exceeds_chance(self):
        assert self.sampled([10.0 + 5 * second for second in range(15)])[1] == pytest.approx(5.0)
        assert self.sampled([50 - 3 * second for second in range(15)])[1] == pytest.approx(-3.0)
        assert self.sampled([10, 12, 9, 11, 13, 10, 12, 11, 10, 12, 13, 11, 10, 12, 13])[1] == 0.0


def test_the_summary_has_rates_of_the_last_minute():
    traffic = Traffic()
    traffic.arrive(60, 2)
    for _ in range(60):
        traffic.end(cached=40, output=30, accepted=10, local=False)
    summary = traffic.meter.seen().summary()
    assert summary["requests_per_s"] == pytest.approx(2, rel=0.05)
    assert summary["prompt_tokens_per_s"] == pytest.approx(200, rel=0.05)
    assert summary["tokens_per_round"] == 1.5
    assert summary["local_prefill_share"] == 0.0


def test_a_snapshot_does_not_change_and_is_not_forgotten():
    traffic = Traffic()
    traffic.arrive(12.3, 10)
    traffic.end(output=10)
    seen = traffic.meter.seen()
    before = seen.demand(), seen.summary()
    traffic.arrive(0.3, 100, prompt=5000)  # within the second that was seen
    traffic.end(output=500)
    assert (seen.demand(), seen.summary()) == before
    now = traffic.meter.seen().demand()
    assert now.num_requests == before[0].num_requests + 30
    assert now.classes[0].output_tokens == pytest.approx(255)
    traffic.arrive(400, 1)
    assert (seen.demand(), seen.summary()) == before


def test_the_traffic_of_two_routers_is_that_of_one_that_saw_it_all():
    whole, first, second = Traffic(), Traffic(), Traffic()
    second.meter = TrafficMeter(lambda: second.now_s + 17.0)  # whose router has started earlier or later
    generator = random.Random(4)
    for traffic in (whole, first, second):
        traffic.now_s += 40.0
    for _ in range(900):
        half = generator.choice((first, second))
        prompt, slo = generator.randrange(50, 3000), generator.choice((INTERACTIVE, BATCH))
        for traffic in (whole, first, second):
            traffic.now_s += 0.1
        for traffic in (whole, half):
            traffic.meter.arrived(make_record(prompt, slo))
            traffic.end(prompt, cached=prompt // 3, output=20, slo=slo)
    joined, alone = first.meter.seen().joined(second.meter.seen()).demand(), whole.meter.seen().demand()
    assert joined.num_requests == alone.num_requests
    assert joined.rate == pytest.approx(alone.rate, rel=0.02)
    shares = {each.slo.name: each.rate for each in joined.classes}
    assert shares == pytest.approx({each.slo.name: each.rate for each in alone.classes}, rel=0.05)


def test_routers_that_wait_are_counted_together():
    traffic = Traffic().meter.seen()
    assert KnownTraffic(traffic, 3).joined(KnownTraffic(traffic, 4)).num_waiting == 7
