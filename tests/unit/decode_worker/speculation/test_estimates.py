"""What is learned of drafts while serving: how often they are accepted, and what steps cost."""

from __future__ import annotations

import pytest

from baton.core.request import Request, SamplingParams
from decode_worker.speculation.acceptance import AcceptanceTracker, DepthAcceptance
from decode_worker.speculation.step_cost import StepCost


def test_an_estimate_moves_from_its_prior_to_what_is_seen_and_forgets() -> None:
    tracker = AcceptanceTracker()
    assert tracker.estimate("x", prior=0.3) == 0.3
    for _ in range(200):
        tracker.record("x", 0.3, 1.0)
    assert tracker.estimate("x", prior=0.3) > 0.95
    for _ in range(200):
        tracker.record("x", 0.3, 0.0)
    assert tracker.estimate("x", prior=0.3) < 0.05
    assert tracker.estimate("y", prior=0.3) == 0.3


def test_costs_are_learned_and_interpolated() -> None:
    cost = StepCost()
    assert cost.ms(1, 9) > cost.ms(1, 1) > 0
    cost.record(1, 1, 20.0)
    cost.record(1, 8, 28.0)
    assert cost.ms(1, 1) == 20.0
    assert 20.0 < cost.ms(1, 4) < 28.0
    assert cost.ms(1, 16) > 28.0
    for _ in range(5):
        cost.record(1, 1, 20_000.0)  # the machine was busy
    assert cost.ms(1, 1) < 20_000.0


def test_a_step_that_took_less_by_far_says_that_the_usual_was_none() -> None:
    cost = StepCost()
    for ms in (60.0, 60.0, 60.0, 8.0):
        cost.record(1, 1, ms)
    assert cost.ms(1, 1) < 17.0


def test_costs_are_found_where_they_were_booked() -> None:
    cost = StepCost()
    cost.record(6, 6, 60.0)
    for _ in range(20):
        cost.record(7, 7, 20.0)
    assert cost.ms(7, 7) < 25.0


def test_more_tokens_never_count_as_cheaper() -> None:
    cost = StepCost()
    cost.record(1, 1, 20.0)
    cost.record(1, 4, 23.0)
    for _ in range(50):
        cost.record(1, 1, 60.0)  # measured while the machine was busy
    assert cost.ms(1, 1) <= cost.ms(1, 4) <= cost.ms(1, 8)


def test_sizes_that_do_not_come_up_any_more_are_forgotten() -> None:
    cost = StepCost()
    cost.record(1, 1, 20.0)
    cost.record(1, 8, 200.0)
    assert cost.ms(1, 8) < 40.0, "a cold one is not taken at its word"
    for _ in range(200):
        cost.record(1, 8, 40.0)
    assert cost.ms(1, 8) > 35.0
    for _ in range(10_000):
        cost.record(1, 1, 20.0)
    assert cost.ms(1, 8) < 25.0


class TestDepthAcceptance:
    def request(self, name: str = "a", temperature: float = 0.0) -> Request:
        return Request(name, [1], SamplingParams(temperature=temperature))

    def test_chances_are_learned_by_depth_and_only_where_the_draft_was_reached(self) -> None:
        chances = DepthAcceptance(prior=0.5)
        for _ in range(200):
            chances.learn(self.request(), num_known=3, num_right=1)
        other = self.request("other")
        assert chances.chance(other, 0) > 0.9
        assert chances.chance(other, 1) < 0.1
        assert chances.chance(other, 2) == 0.5
        reach = chances.reach(other, 3)
        assert reach == pytest.approx([reach[0], reach[0] * chances.chance(other, 1), reach[1] * 0.5])

    def test_a_request_worse_than_its_like_is_known_for_it(self) -> None:
        chances = DepthAcceptance(prior=0.5)
        good, bad = self.request("good"), self.request("bad")
        for _ in range(50):
            chances.learn(good, 1, 1)
            chances.learn(bad, 1, 0)
        assert chances.chance(bad, 0) < 0.25 < 0.6 < chances.chance(good, 0) <= 1
        chances.forget("bad")
        assert chances.chance(bad, 0) == chances.chance(self.request("new"), 0)

    def test_temperatures_are_kept_apart(self) -> None:
        chances = DepthAcceptance(prior=0.5)
        for _ in range(100):
            chances.learn(self.request(temperature=1.0), 1, 0)
        assert chances.chance(self.request("new"), 0) == 0.5


def test_a_cold_first_step_of_a_size_does_not_rule_it_out() -> None:
    cost = StepCost()
    cost.record(1, 1, 10.0)
    cost.record(1, 9, 150.0)
    assert cost.ms(1, 9) < 40.0
