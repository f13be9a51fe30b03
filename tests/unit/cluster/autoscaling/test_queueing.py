"""Queueing formulas against values that are known exactly."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.autoscaling.queueing import erlang_c, poisson_at_most, wait_exceeds


@pytest.mark.parametrize(
    ("servers", "offered", "probability"),
    [(1, 0.5, 0.5), (2, 1.0, 1 / 3), (3, 2.0, 4 / 9), (5, 5.0, 1.0), (4, 0.0, 0.0)],
)
def test_erlang_c_matches_the_published_formula(servers, offered, probability):
    assert erlang_c(servers, offered) == pytest.approx(probability)


@given(st.integers(1, 60), st.floats(0.05, 0.99))
def test_the_recursion_matches_the_sum(servers, load):
    offered = load * servers
    all_busy = offered**servers / math.factorial(servers) / (1 - load)
    others = sum(offered**count / math.factorial(count) for count in range(servers))
    assert erlang_c(servers, offered) == pytest.approx(all_busy / (others + all_busy))


@pytest.mark.parametrize("limit_s", [0.0, 0.5, 2.0])
def test_one_server_with_exponential_times_is_exact(limit_s):
    load, service_s = 0.8, 0.4  # M/M/1: P(W > t) = load · exp(-(1 - load) · t / service)
    found = wait_exceeds(limit_s, 1, load, 0.0, load, service_s, variation=1.0)
    assert found == pytest.approx(load * math.exp(-(1 - load) * limit_s / service_s))


@given(st.integers(1, 50), st.floats(0.01, 60), st.floats(0, 5), st.floats(0, 4))
def test_more_servers_never_mean_a_longer_wait(servers, offered, limit_s, variation):
    waits = [wait_exceeds(limit_s, number, offered, 0.0, offered, 1.0, variation) for number in (servers, servers + 1)]
    assert 0.0 <= waits[1] <= waits[0] <= 1.0


def test_higher_priority_waits_less():
    urgent = wait_exceeds(1.0, 4, 3.5, ahead=0.0, upto=1.0, service_s=1.0, variation=1.0)
    patient = wait_exceeds(1.0, 4, 3.5, ahead=1.0, upto=3.5, service_s=1.0, variation=1.0)
    assert urgent < patient / 3


@pytest.mark.parametrize("mean", [3.0, 10.0, 40.0])
def test_the_normal_approximation_is_close_to_poisson(mean):
    for limit in (int(mean * 0.7), int(mean), int(mean * 1.4)):
        exact = sum(math.exp(-mean) * mean**count / math.factorial(count) for count in range(limit + 1))
        assert poisson_at_most(limit, mean) == pytest.approx(exact, abs=0.05)
