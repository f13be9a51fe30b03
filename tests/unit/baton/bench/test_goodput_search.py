"""The search finds the rate at which a server stops to keep up, with as few probes as it can."""

import numpy as np
import pytest

from baton.bench.goodput_search import RateVerdict, SearchLimits, search_goodput


def server(capacity: float, num_requests: int = 200):
    """Keeps every objective up to ``capacity`` and none above; ``rates`` says what was probed."""
    rates: list[float] = []

    async def probe(rate):
        rates.append(rate)
        return (num_requests if rate <= capacity else 0), num_requests

    return probe, rates


@pytest.mark.parametrize("capacity", [0.3, 1.0, 7.3, 119.0])
async def test_the_search_finds_the_capacity(capacity):
    probe, rates = server(capacity)
    result = await search_goodput(probe, SearchLimits(precision=0.05))
    assert result.is_complete
    assert result.goodput is not None
    assert result.goodput <= capacity < result.failed_at <= result.goodput * 1.05
    assert len(rates) == len(result.verdicts) <= 16


async def test_the_allowed_range_ends_the_search():
    probe, rates = server(1000.0)
    result = await search_goodput(probe, SearchLimits(start=4, highest=10))
    assert (result.goodput, result.failed_at, result.is_complete) == (10, None, True)
    assert rates == [4, 8, 10]
    probe, rates = server(0.001)
    result = await search_goodput(probe, SearchLimits(start=1, lowest=0.4))
    assert (result.goodput, result.failed_at, result.is_complete) == (None, 0.4, True)
    assert rates == [1, 0.5, 0.4]


async def test_the_number_of_probed_rates_is_bounded():
    probe, rates = server(7.3)
    result = await search_goodput(probe, SearchLimits(precision=1e-9, max_rates=6))
    assert not result.is_complete
    assert len(rates) == 6


async def test_a_close_result_is_probed_again_and_pooled():
    counts = iter([(90, 100), (92, 100), (93, 100)])

    async def probe(rate):
        return next(counts)

    result = await search_goodput(probe, SearchLimits(goal=0.9, max_rates=1, max_repeats=3))
    (verdict,) = result.verdicts
    assert (verdict.num_probes, verdict.num_good, verdict.num_requests) == (3, 275, 300)
    assert verdict.holds
    assert not verdict.is_certain


async def test_an_interrupted_search_reports_what_it_found():
    answers = iter([(100, 100), None])

    async def probe(rate):
        return next(answers)

    result = await search_goodput(probe, SearchLimits())
    assert result.goodput == 1.0
    assert not result.is_complete


async def test_a_rate_without_measurements_ends_the_search_without_a_verdict():
    counts = iter([(100, 100), (0, 0), (0, 0), (0, 0)])

    async def probe(rate):
        return next(counts)

    result = await search_goodput(probe, SearchLimits(max_repeats=3))
    assert result.unmeasured_at == 2.0
    assert not result.is_complete
    assert [verdict.rate for verdict in result.verdicts] == [1.0]
    assert (result.goodput, result.failed_at) == (1.0, None)


async def test_a_probe_without_measurements_is_repeated():
    counts = iter([(0, 0), (100, 100)])

    async def probe(rate):
        return next(counts)

    result = await search_goodput(probe, SearchLimits(max_rates=1))
    assert (result.goodput, result.unmeasured_at) == (1.0, None)


def test_the_confidence_interval_has_its_stated_coverage():
    rng = np.random.default_rng(4)
    draws = rng.binomial(150, 0.9, 3000)
    by_count = {good: RateVerdict(1.0, 0.9, good, 150).interval for good in set(draws.tolist())}
    intervals = [by_count[good] for good in draws.tolist()]
    assert np.mean([low <= 0.9 <= high for low, high in intervals]) == pytest.approx(0.95, abs=0.015)
    assert RateVerdict(1.0, 0.9).interval == (0.0, 1.0)
