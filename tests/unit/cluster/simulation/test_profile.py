"""Simulation profiles: built-in profiles, files, and errors."""

import json
import os

import pytest

from baton.core.errors import ConfigError
from cluster.latency.store import FitStore
from cluster.simulation.fitting import fitted_profile, newest_fits, profile_text
from cluster.simulation.profile import load_profile, profile_names
from cluster.simulation.timing import StepWork
from tests.simulated import make_profile


@pytest.mark.parametrize("name", profile_names())
def test_shipped_profiles_are_plausible(name):
    profile = load_profile(name)
    for pool in ("prefill", "decode"):
        costs = profile.costs(pool)
        prompt = StepWork(prompt_tokens=8192, attention_pairs=8192 * 8193 // 2, sequences=1).ms(costs)
        step = StepWork(sequences=32, context_tokens=32 * 2048).ms(costs)
        assert 5_000 < 8192 / prompt * 1e3 < 60_000  # tokens per second
        assert 5 < step < 60


def test_there_is_more_than_one_profile():
    assert {"h100-8b", "h100-70b-tp4"} <= set(profile_names())


def test_a_profile_can_be_a_file(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(profile_text(make_profile(kv_tokens=777)), encoding="utf-8")
    assert load_profile(str(file)).kv_tokens == 777
    as_json = tmp_path / "mine.json"
    as_json.write_text(json.dumps(make_profile(noise=0.5).model_dump(mode="json")), encoding="utf-8")
    assert load_profile(str(as_json)).noise == 0.5


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kv_tokens": 0}, "kv_tokens"),
        ({"nois": 0.1}, "nois"),
        ({"step": {"fixed": -1.0}}, "step.fixed"),
        ({"speculation": [{"batch": 1, "tokens_per_round": 3.0, "drafted": 1.0}]}, "drafted"),
        (
            {
                "speculation": [
                    {"batch": 8, "tokens_per_round": 1.5, "drafted": 1.0},
                    {"batch": 1, "tokens_per_round": 1.5, "drafted": 1.0},
                ]
            },
            "ascend",
        ),
    ],
)
def test_impossible_profiles_are_refused(tmp_path, change, said):
    file = tmp_path / "wrong.yaml"
    file.write_text(json.dumps({**make_profile().model_dump(mode="json"), **change}), encoding="utf-8")
    with pytest.raises(ConfigError, match=said):
        load_profile(str(file))


def test_unknown_names_are_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="Did you mean 'h100-8b'"):
        load_profile("h100-8B")


def test_rates_are_those_of_the_largest_reached_batch():
    rates = [
        {"batch": 2, "tokens_per_round": 2.0, "drafted": 4.0},
        {"batch": 8, "tokens_per_round": 1.5, "drafted": 2.0},
    ]
    profile = make_profile(speculation=rates)
    assert [profile.rates(batch) for batch in (1, 2, 7, 8, 99)] == [
        (1.0, 0.0),
        (2.0, 4.0),
        (2.0, 4.0),
        (1.5, 2.0),
        (1.5, 2.0),
    ]


def test_a_profile_is_fitted_to_costs_learned_by_routers(tmp_path):
    store = FitStore(tmp_path)
    for pool, fixed in (("prefill", 20.0), ("decode", 12.0)):
        store.save(("model", pool, "cpu", "bfloat16", "2"), (fixed, 0.4, 2e-4, 0.3, 6e-4, 0.5))
    old = ("older model", "decode", "cpu", "bfloat16", "2")
    store.save(old, (99.0, 0.4, 2e-4, 0.3, 6e-4, 0.5))
    for file in tmp_path.glob("*.json"):
        if json.loads(file.read_text())["kind"] == list(old):
            os.utime(file, (1, 1))
    fitted = fitted_profile(make_profile(), newest_fits(tmp_path))
    assert fitted.costs("prefill").fixed == 20.0
    assert fitted.costs("decode").fixed == 12.0
    assert fitted.kv_tokens == make_profile().kv_tokens


def test_missing_learned_costs_are_reported(tmp_path):
    with pytest.raises(ConfigError, match="real prefill workers"):
        fitted_profile(make_profile(), newest_fits(tmp_path))
