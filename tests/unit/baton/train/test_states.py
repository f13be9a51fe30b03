"""The target's states are those of transformers, whichever way they come."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from baton.engine.models.model_loader import LoadedModel
from baton.train.dataset import Sample
from baton.train.states import CachedStates, JoinedStates, LiveStates
from baton.train.target import FrozenTarget

LAYERS = (2, 4, 5)


@pytest.fixture
def frozen(target: LoadedModel) -> FrozenTarget:
    return FrozenTarget(target.model, LAYERS)


@pytest.fixture
def mixed(samples: list[Sample]) -> list[Sample]:
    """Many samples of different lengths, more than one shard."""
    return [Sample(sample.token_ids[: 8 + index % 17], 5) for index, sample in enumerate(samples[:150])]


def test_states_match_a_run_of_each_sample_alone(
    target: LoadedModel, frozen: FrozenTarget, mixed: list[Sample]
) -> None:
    for sample, states in zip(mixed[:30], frozen.states_of(mixed[:30]), strict=True):
        with torch.no_grad():
            output = target.model(torch.tensor([sample.token_ids]), output_hidden_states=True)
        features = torch.cat([output.hidden_states[layer][0] for layer in LAYERS], dim=-1)
        torch.testing.assert_close(states.features, features, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(states.final, output.hidden_states[-1][0, 4:], rtol=1e-4, atol=1e-5)
        assert torch.equal(states.choices, output.logits[0, 4:].argmax(dim=-1))


def test_the_cache_holds_the_states_of_the_target(tmp_path: Path, frozen: FrozenTarget, mixed: list[Sample]) -> None:
    cached, live = CachedStates(tmp_path, frozen, "a", mixed), LiveStates(frozen, mixed)
    cached.fill()
    chosen = [149, 3, 128, 127, 0]
    for ours, theirs in zip(cached.load(chosen), live.load(chosen), strict=True):
        torch.testing.assert_close(ours.features, theirs.features, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ours.final, theirs.final, rtol=1e-4, atol=1e-5)
        assert torch.equal(ours.choices, theirs.choices)


def test_the_cache_is_filled_once(tmp_path: Path, frozen: FrozenTarget, mixed: list[Sample]) -> None:
    cached = CachedStates(tmp_path, frozen, "a", mixed)
    sizes = [sum(len(sample.token_ids) for sample in part) for part in (mixed[:128], mixed[128:])]
    assert cached.num_missing_tokens() == sum(sizes)
    reports: list[int] = []
    cached.fill(reports.append)
    assert reports == sizes
    again = CachedStates(tmp_path, frozen, "a", mixed)
    assert again.num_missing_tokens() == 0
    again.fill(reports.append)
    assert reports == sizes


@pytest.mark.parametrize("change", ["target", "layers", "samples", "broken file"])
def test_an_unrelated_cache_is_replaced(
    tmp_path: Path, frozen: FrozenTarget, target: LoadedModel, mixed: list[Sample], change: str
) -> None:
    CachedStates(tmp_path, frozen, "a", mixed).fill()
    other, fingerprint, samples = frozen, "a", list(mixed)
    if change == "target":
        fingerprint = "b"
    elif change == "layers":
        other = FrozenTarget(target.model, (1, 4, 5))
    elif change == "samples":
        samples[140] = Sample(samples[140].token_ids, 4)
    else:
        (tmp_path / "states-00001.safetensors").write_bytes(b"cut off")
    cached = CachedStates(tmp_path, other, fingerprint, samples)
    computed: list[int] = []
    cached.fill(computed.append)
    assert len(computed) == (2 if change in ("target", "layers") else 1)
    for ours, theirs in zip(cached.load([140]), LiveStates(other, samples).load([140]), strict=True):
        torch.testing.assert_close(ours.features, theirs.features, rtol=1e-4, atol=1e-5)


def test_a_larger_dataset_keeps_cached_states(tmp_path: Path, frozen: FrozenTarget, mixed: list[Sample]) -> None:
    CachedStates(tmp_path, frozen, "a", mixed[:128]).fill()
    computed: list[int] = []
    CachedStates(tmp_path, frozen, "a", mixed).fill(computed.append)
    assert computed == [sum(len(sample.token_ids) for sample in mixed[128:])]


def test_joined_sources_act_as_one(frozen: FrozenTarget, mixed: list[Sample]) -> None:
    groups = [mixed[:3], [], mixed[3:10]]
    joined = JoinedStates([LiveStates(frozen, group) for group in groups], [len(group) for group in groups])
    chosen = [9, 0, 3, 2]
    for ours, theirs in zip(joined.load(chosen), LiveStates(frozen, mixed).load(chosen), strict=True):
        torch.testing.assert_close(ours.features, theirs.features, rtol=1e-4, atol=1e-5)
