"""Unrolled steps compute what the head computes when it drafts one token after another."""

from __future__ import annotations

import pytest
import torch

from baton.engine.draft.eagle.head import EagleHead
from baton.engine.models.model_loader import LoadedModel
from baton.train.batches import make_rows
from baton.train.dataset import Sample
from baton.train.head_init import head_settings, initial_head
from baton.train.settings import Eagle3Settings
from baton.train.target import FrozenTarget
from baton.train.unroll import unroll

NUM_STEPS = 4


@pytest.fixture
def lengths() -> list[Sample]:
    """Prompts and answers of different lengths, one with no context at all."""
    generator = torch.Generator().manual_seed(3)
    sizes = [(14, 5), (9, 1), (20, 12), (7, 4)]
    return [Sample(tuple(torch.randint(0, 96, (n,), generator=generator).tolist()), prompt) for n, prompt in sizes]


@pytest.fixture
def frozen(target: LoadedModel) -> FrozenTarget:
    return FrozenTarget(target.model, (2, 4, 5))


@pytest.fixture
def head(target: LoadedModel, frozen: FrozenTarget, lengths: list[Sample]) -> EagleHead:
    settings = head_settings(target.model, Eagle3Settings(), 60)
    made = initial_head(settings, target.model, torch.arange(60), lengths, frozen.states_of(lengths), seed=1)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)) * 0.2)
    return made.requires_grad_(False)


def draft_for_real(
    head: EagleHead, features: torch.Tensor, sample: Sample, row: int, tokens: list[int]
) -> list[torch.Tensor]:
    """Runs the head over the whole prefix, then over its own outputs one at a time, all of it anew each time."""
    hidden = head.fuse(features[: row + 1])
    token_ids = list(sample.token_ids[1 : row + 2])
    outputs = []
    for token in [None, *tokens]:
        if token is not None:
            token_ids.append(token)
        feedback, normed = head(torch.tensor(token_ids), hidden, torch.arange(len(hidden)))
        outputs.append(normed[-1])
        hidden = torch.cat((hidden, feedback[-1:]))
    return outputs


def test_teacher_forced_steps_match_real_drafting(head: EagleHead, frozen: FrozenTarget, lengths: list[Sample]) -> None:
    states = frozen.states_of(lengths)
    batch = make_rows(lengths, states)
    steps = torch.stack(list(unroll(head, batch, NUM_STEPS)))
    start = 0
    for sample, state, count in zip(lengths, states, batch.counts, strict=True):
        first = len(sample.token_ids) - 2 - count
        for row in range(count):
            tokens = list(sample.token_ids[first + row + 2 : first + row + 1 + NUM_STEPS])[: count - row - 1]
            expected = draft_for_real(head, state.features, sample, first + row, tokens)
            assert len(expected) == min(NUM_STEPS, count - row)
            found = steps[: len(expected), start + row]
            torch.testing.assert_close(found, torch.stack(expected), rtol=1e-4, atol=1e-4)
        start += count


def test_recursive_steps_match_real_drafting(head: EagleHead, frozen: FrozenTarget, lengths: list[Sample]) -> None:
    states = frozen.states_of(lengths)
    batch = make_rows(lengths, states)

    def choose(step: int, normed: torch.Tensor) -> torch.Tensor:
        return head.to_target_ids(head.logits(normed).argmax(dim=-1))

    steps = torch.stack(list(unroll(head, batch, NUM_STEPS, choose)))
    for start, sample, state, count in ((0, lengths[0], states[0], batch.counts[0]),):
        first = len(sample.token_ids) - 2 - count
        for row in range(count):
            tokens = head.to_target_ids(head.logits(steps[:-1, start + row]).argmax(dim=-1)).tolist()
            expected = draft_for_real(head, state.features, sample, first + row, tokens)
            torch.testing.assert_close(steps[:, start + row], torch.stack(expected), rtol=1e-4, atol=1e-4)


def test_rows_do_not_see_later_tokens(head: EagleHead, frozen: FrozenTarget, lengths: list[Sample]) -> None:
    """A changed last token moves nothing but the rows that have it."""
    changed = [Sample((*sample.token_ids[:-2], 7, 8), sample.num_prompt_tokens) for sample in lengths]
    found, other = (list(unroll(head, make_rows(group, frozen.states_of(group)), 2)) for group in (lengths, changed))
    batch = make_rows(lengths, frozen.states_of(lengths))
    untouched = batch.num_left > 3
    assert int(untouched.sum()) > 10
    for ours, theirs in zip(found, other, strict=True):
        torch.testing.assert_close(ours[untouched], theirs[untouched], rtol=1e-5, atol=1e-5)
        assert not torch.equal(ours, theirs)
