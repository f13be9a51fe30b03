"""A leap takes exactly the time of its steps."""

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.simulation.timing import Leap, Noise

milliseconds = st.floats(0.01, 1e3)
growths = st.one_of(st.just(0.0), st.floats(1e-6, 10.0))


def step_ends(leap: Leap) -> list[float]:
    steps = (leap.first_ms + leap.growth_ms * index for index in range(leap.num_steps))
    return [leap.started_s + ms / 1e3 for ms in accumulate(steps)]


@given(milliseconds, growths, st.integers(1, 400))
def test_end_times_match_single_steps(first_ms, growth_ms, num_steps):
    leap = Leap(5.0, num_steps, first_ms, growth_ms)
    ends = step_ends(leap)
    assert leap.end_s() == pytest.approx(ends[-1])
    assert leap.end_s(1) == pytest.approx(ends[0])


@given(milliseconds, growths, st.integers(1, 100), st.floats(0, 1))
def test_the_current_step_is_found(first_ms, growth_ms, num_steps, share):
    leap = Leap(0.0, num_steps, first_ms, growth_ms)
    now_s = share * leap.end_s()
    begun = leap.steps_begun(now_s)
    assert 1 <= begun <= num_steps
    assert leap.end_s(begun) >= now_s - 1e-6
    if begun > 1:
        assert leap.end_s(begun - 1) <= now_s + 1e-6


def test_noise_keeps_the_mean_and_shrinks_for_longer_leaps():
    noise = Noise(0.2, "seed")
    single = [noise.factor(1) for _ in range(4000)]
    long = [noise.factor(100) for _ in range(4000)]
    assert sum(single) / 4000 == pytest.approx(1.0, abs=0.02)
    assert max(long) - min(long) < (max(single) - min(single)) / 5


def test_noise_depends_only_on_the_seed():
    first, again, other = (Noise(0.1, seed) for seed in ("a", "a", "b"))
    factors = [[noise.factor(1) for _ in range(5)] for noise in (first, again, other)]
    assert factors[0] == factors[1] != factors[2]
    assert Noise(0.0, "a").factor(3) == 1.0
