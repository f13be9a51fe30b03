"""The profile of a step: every sequence decodes while it is taken, and the shares are those of whole steps."""

from __future__ import annotations

import pytest

from baton.engine.models.model_loader import prepare_model
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.runner.options import RunnerOptions
from benchmarks.step_profile import Profile, blocks_needed, decoding_engine, profile_steps
from tests.tiny_models import tiny_model


@pytest.mark.parametrize("batch", [1, 5])
def test_the_profile_accounts_for_the_time_of_a_step(batch: int) -> None:
    context, num_steps, num_profiles = 24, 4, 5
    most_steps = 2 * num_steps * num_profiles
    runner = ModelRunner(
        prepare_model(tiny_model("llama"), "float32"),
        blocks_needed(batch, context, most_steps),
        16,
        RunnerOptions(decoder="transformers"),
    )
    engine = decoding_engine(runner, batch, context, most_steps)
    profiles = [profile_steps(engine, num_steps) for _ in range(num_profiles)]
    assert engine.scheduler.num_running == batch  # no sequence has finished
    for profile in profiles:
        assert set(profile.shares) == {"schedule", "build the batch", "forward", "sample", "post-process"}
        assert all(0 < share < 1 for share in profile.shares.values())
        assert 0 <= profile.rest < 1
        own = [function.own_s for function in profile.functions]
        assert own == sorted(own, reverse=True)
    # Other processes may interrupt any phase of so few steps, or the time between two steps.
    assert any(max(profile.shares, key=lambda name: profile.shares[name]) == "forward" for profile in profiles)
    assert any(own_s_of(profile) == pytest.approx(profile.step_ms * num_steps / 1e3, rel=0.2) for profile in profiles)


def own_s_of(profile: Profile) -> float:
    """Seconds of all functions without what they called."""
    return sum(function.own_s for function in profile.functions)
