"""What is learned of drafts while serving: how often they are accepted."""

from __future__ import annotations

import pytest

from baton.core.request import Request, SamplingParams
from decode_worker.speculation.acceptance import AcceptanceTracker, DepthAcceptance


def test_an_estimate_moves_from_its_prior_to_the_observations_and_forgets() -> None:
    tracker = AcceptanceTracker()
    assert tracker.estimate("x", prior=0.3) == 0.3
    for _ in range(200):
        tracker.record("x", 0.3, 1.0)
    assert tracker.estimate("x", prior=0.3) > 0.95
    for _ in range(200):
        tracker.record("x", 0.3, 0.0)
    assert tracker.estimate("x", prior=0.3) < 0.05
    assert tracker.estimate("y", prior=0.3) == 0.3


class TestDepthAcceptance:
    def request(self, name: str = "a", temperature: float = 0.0) -> Request:
        return Request(name, [1], SamplingParams(temperature=temperature))

    def test_acceptance_is_learned_by_depth_and_only_for_reached_drafts(self) -> None:
        chances = DepthAcceptance(prior=0.5)
        for _ in range(200):
            chances.learn(self.request(), num_known=3, num_right=1)
        other = self.request("other")
        assert chances.chance(other, 0) > 0.9
        assert chances.chance(other, 1) < 0.1
        assert chances.chance(other, 2) == 0.5
        reach = chances.reach(other, 3)
        assert reach == pytest.approx([reach[0], reach[0] * chances.chance(other, 1), reach[1] * 0.5])

    def test_a_request_worse_than_the_average_is_recognized(self) -> None:
        chances = DepthAcceptance(prior=0.5)
        good, bad = self.request("good"), self.request("bad")
        for _ in range(50):
            chances.learn(good, 1, 1)
            chances.learn(bad, 1, 0)
        assert chances.chance(bad, 0) < 0.25 < 0.6 < chances.chance(good, 0) <= 1
        chances.forget("bad")
        assert chances.chance(bad, 0) == chances.chance(self.request("new"), 0)

    def test_temperatures_are_distinguished(self) -> None:
        chances = DepthAcceptance(prior=0.5)
        for _ in range(100):
            chances.learn(self.request(temperature=1.0), 1, 0)
        assert chances.chance(self.request("new"), 0) == 0.5
