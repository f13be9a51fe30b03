"""Acceptance is counted as a decode worker would find it."""

from __future__ import annotations

import pytest
import torch

from baton.engine.draft.eagle.head import EagleHead
from baton.engine.models.model_loader import LoadedModel
from baton.train.batches import make_rows
from baton.train.dataset import Sample
from baton.train.evaluate import Acceptance, evaluate
from baton.train.head_init import head_settings, initial_head
from baton.train.settings import Eagle3Settings
from baton.train.target import FrozenTarget

NUM_DRAFTS = 3


def test_acceptance_rates_are_merged_by_count() -> None:
    found = Acceptance(reached=[10, 8], accepted=[5, 2])
    found.add(Acceptance(reached=[10, 8], accepted=[7, 2]))
    assert found.unconditional == [0.6, 0.25]
    assert found.conditional == pytest.approx([0.6, 0.25 / 0.6])
    assert found.mean_accepted_length == pytest.approx(1.85)


def test_an_empty_evaluation_has_zero_rates() -> None:
    assert Acceptance().mean_accepted_length == 1.0
    assert Acceptance([0, 0], [0, 0]).conditional == [0.0, 0.0]


@pytest.fixture
def head(target: LoadedModel, samples: list[Sample]) -> EagleHead:
    frozen = FrozenTarget(target.model, (2, 4, 5))
    settings = head_settings(target.model, Eagle3Settings(), 96)
    made = initial_head(settings, target.model, torch.arange(96), samples[:40], frozen.states_of(samples[:40]), seed=0)
    return made.requires_grad_(False)


def test_acceptance_matches_drafting_one_position_at_a_time(
    target: LoadedModel, samples: list[Sample], head: EagleHead
) -> None:
    chosen = samples[:12]
    states = FrozenTarget(target.model, (2, 4, 5)).states_of(chosen)
    found = evaluate(head, [make_rows(chosen, states)], NUM_DRAFTS)
    reached, accepted = [0] * NUM_DRAFTS, [0] * NUM_DRAFTS
    for sample, state in zip(chosen, states, strict=True):
        for row in range(sample.num_prompt_tokens - 1, len(sample.token_ids) - 2):
            drafts = draft(head, state.features, list(sample.token_ids), row)
            said = sample.token_ids[row + 2 : row + 2 + NUM_DRAFTS]
            for length in range(1, len(said) + 1):
                reached[length - 1] += 1
                accepted[length - 1] += drafts[:length] == list(said[:length])
    assert found.greedy.reached == reached
    assert found.greedy.accepted == accepted
    assert 0 < accepted[0] < reached[0]
    assert found.sampled.reached == []


def draft(head: EagleHead, features: torch.Tensor, token_ids: list[int], row: int) -> list[int]:
    hidden, known = head.fuse(features[: row + 1]), token_ids[1 : row + 2]
    drafts: list[int] = []
    for _ in range(NUM_DRAFTS):
        feedback, normed = head(torch.tensor(known), hidden, torch.arange(len(known)))
        drafts.append(int(head.to_target_ids(head.logits(normed[-1]).argmax())))
        known = [*known, drafts[-1]]
        hidden = torch.cat((hidden, feedback[-1:]))
    return drafts


def test_sampled_answers_are_counted_separately(target: LoadedModel, samples: list[Sample], head: EagleHead) -> None:
    changed = Sample((*samples[0].token_ids[:9], 50, 51, 52, *samples[0].token_ids[12:]), 5)
    chosen = [samples[1], changed]
    states = FrozenTarget(target.model, (2, 4, 5)).states_of(chosen)
    found = evaluate(head, [make_rows(chosen, states)], NUM_DRAFTS)
    assert found.greedy.reached == found.sampled.reached == [19, 18, 17]
