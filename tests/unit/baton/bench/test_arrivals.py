"""Arrival times: their rate, their spread, and that they are known beforehand."""

import numpy as np
import pytest

from baton.bench.stages import intended_times, replayed_times
from baton.core.errors import ConfigError


def gaps(process: str, burstiness: float = 1.0) -> np.ndarray:
    times = intended_times(process, 20.0, 20_000, np.random.default_rng(2), burstiness)
    assert times == sorted(times)
    return np.diff([0.0, *times])


@pytest.mark.parametrize(("process", "burstiness"), [("poisson", 1), ("bursty", 0.25), ("bursty", 4), ("constant", 1)])
def test_the_rate_is_the_requested_one(process, burstiness):
    assert 1 / gaps(process, burstiness).mean() == pytest.approx(20.0, rel=0.05)


def test_the_spread_matches_the_process():
    def spread(values):
        return values.std() / values.mean()

    assert spread(gaps("constant")) == pytest.approx(0.0, abs=1e-6)
    assert spread(gaps("poisson")) == pytest.approx(1.0, rel=0.05)
    assert spread(gaps("bursty", 1.0)) == pytest.approx(1.0, rel=0.05)
    assert spread(gaps("bursty", 0.25)) == pytest.approx(2.0, rel=0.05)  # one over the root of the shape


def test_a_replay_can_be_sped_up():
    assert replayed_times([0.0, 3.0, 10.0], 2.0) == [0.0, 1.5, 5.0]


def test_an_unknown_process_is_refused():
    rng = np.random.default_rng(0)
    with pytest.raises(ConfigError, match="Did you mean poisson"):
        intended_times("poison", 1.0, 1, rng)
    with pytest.raises(ConfigError, match="above 0"):
        intended_times("poisson", 0.0, 1, rng)
    with pytest.raises(ConfigError, match="speed-up"):
        replayed_times([0.0], 0.0)
