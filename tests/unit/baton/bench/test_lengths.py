"""Length distributions draw what their names say."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.bench.lengths import lognormal, parse_lengths
from baton.core.errors import ConfigError


def draws(text: str, count: int = 20_000) -> np.ndarray:
    distribution, rng = parse_lengths("--input", text), np.random.default_rng(1)
    return np.array([distribution.sample(rng) for _ in range(count)])


def test_a_number_is_a_fixed_length():
    assert set(draws("512", 10)) == {512}
    assert set(draws("fixed:7", 10)) == {7}


def test_uniform_reaches_both_ends():
    values = draws("uniform:3-6", 500)
    assert set(values) == {3, 4, 5, 6}


def test_lognormal_has_the_requested_median_and_p95():
    values = draws("lognormal:median=200,p95=800")
    assert np.median(values) == pytest.approx(200, rel=0.03)
    assert np.percentile(values, 95) == pytest.approx(800, rel=0.05)


def test_lognormal_has_the_requested_mean():
    values = draws("lognormal:mean=300,sigma=0.9")
    assert values.mean() == pytest.approx(300, rel=0.03)
    assert np.log(values).std() == pytest.approx(0.9, rel=0.03)


@given(st.floats(0.01, 3), st.floats(0.1, 3), st.integers(0, 1000))
def test_every_length_is_at_least_one(median, sigma, seed):
    rng = np.random.default_rng(seed)
    assert all(lognormal(np.log(median), sigma).sample(rng) >= 1 for _ in range(20))


@pytest.mark.parametrize(
    ("text", "mean"),
    [("512", 512), ("uniform:100-300", 200), ("lognormal:mean=300,sigma=0.9", 300)],
)
def test_the_mean_matches_the_draws(text, mean):
    assert parse_lengths("--input", text).mean == pytest.approx(mean)


def test_no_draw_exceeds_the_longest_possible_prompt():
    assert max(draws("lognormal:median=0.01,p95=1e7", 500)) == 10_000_000


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("lognorml:median=2,p95=3", "Did you mean lognormal?"),
        ("lognormal:median=200", "either median and p95 or mean and sigma"),
        ("lognormal:median=200,p95=100", "must be above the median"),
        ("lognormal:medain=200,p95=300", "Did you mean median?"),
        ("lognormal:median=2,median=3", "given twice"),
        ("uniform:5", "LOW-HIGH"),
        ("uniform:9-5", "Swap them"),
        ("0", "not a number above 0"),
        ("1.5", "not a whole number"),
        ("nan", "not a number above 0"),
        ("file:lengths.txt", "is unknown"),
        ("1e9", "1000000000 tokens are more than 10000000"),
        ("uniform:5-1e9", "1000000000 tokens are more than 10000000"),
        ("lognormal:median=5,p95=1e9", "1000000000 tokens are more than 10000000"),
    ],
)
def test_an_unknown_distribution_is_refused_with_an_explanation(text, fragment):
    with pytest.raises(ConfigError) as caught:
        parse_lengths("--input", text)
    assert "--input" in caught.value.message or text.startswith("lognormal")
    assert fragment in caught.value.message
