"""Rows match the head's inputs and targets; batches depend only on their numbers."""

from __future__ import annotations

import torch

from baton.train.batches import epoch_batches, make_rows, num_rows_of, split_samples
from baton.train.dataset import Sample
from baton.train.target import SampleStates


def states_that_name_positions(sample: Sample) -> SampleStates:
    """Every state is its own position."""
    positions = torch.arange(len(sample.token_ids), dtype=torch.float32)
    behind = positions[max(0, sample.num_prompt_tokens - 1) :]
    return SampleStates(positions[:, None], behind[:, None], behind.long())


def test_rows_match_the_drawing_in_the_docstring() -> None:
    sample = Sample(tuple(b"abcdefg"), 3)
    batch = make_rows([sample], [states_that_name_positions(sample)])
    assert batch.context_features[:, 0].tolist() == [0, 1]
    assert bytes(batch.context_token_ids.tolist()) == b"bc"
    assert batch.features[:, 0].tolist() == [2, 3, 4]
    assert bytes(batch.token_ids.tolist()) == b"def"
    assert batch.positions.tolist() == [2, 3, 4]
    assert bytes(batch.next_token_ids.tolist()) == b"efg"
    assert batch.final[:, 0].tolist() == [3, 4, 5]  # of the tokens d, e and f
    assert batch.choices.tolist() == [3, 4, 5]


def test_steps_stay_within_their_sample() -> None:
    samples = [Sample(tuple(b"abcdefg"), 3), Sample(tuple(b"vwxyz"), 1)]
    batch = make_rows(samples, [states_that_name_positions(sample) for sample in samples])
    assert batch.counts == (3, 3)
    assert batch.rows_at(0).tolist() == [0, 1, 2, 3, 4, 5]
    assert batch.rows_at(1).tolist() == [0, 1, 3, 4]
    assert batch.rows_at(3).tolist() == []
    assert batch.shifted(1).tolist() == [1, 2, 2, 4, 5, 5]


def test_samples_without_a_prompt_or_with_short_answers_have_the_right_rows() -> None:
    assert num_rows_of(Sample(tuple(b"abcd"), 0)) == 2
    assert num_rows_of(Sample(tuple(b"abcd"), 2)) == 1
    assert num_rows_of(Sample(tuple(b"abcd"), 3)) == 0
    sample = Sample(tuple(b"abcd"), 0)
    batch = make_rows([sample], [states_that_name_positions(sample)])
    assert (batch.features[:, 0].tolist(), batch.final[:, 0].tolist()) == ([0, 1], [1, 2])


def test_the_split_is_stable_as_samples_are_added(samples: list[Sample]) -> None:
    training, held_out = split_samples(samples[:150], 0.2, seed=1)
    assert sorted(training + held_out) == list(range(150))
    assert 10 < len(held_out) < 60
    more_training, more_held_out = split_samples(samples, 0.2, seed=1)
    assert set(training) <= set(more_training)
    assert set(held_out) <= set(more_held_out)
    assert split_samples(samples, 0.2, seed=2) != (more_training, more_held_out)


def test_answers_to_one_prompt_are_on_the_same_side() -> None:
    samples = [Sample((prompt, answer, 3, 4), 1) for prompt in range(40) for answer in (1, 2)]
    training, held_out = split_samples(samples, 0.3, seed=0)
    assert held_out
    assert not {samples[i].token_ids[0] for i in training} & {samples[i].token_ids[0] for i in held_out}


def test_short_samples_are_left_out_and_neither_side_is_empty() -> None:
    samples = [Sample((1, 2, 3), 2), Sample((1, 2, 3, 4), 1), Sample((2, 2, 3, 4), 1)]
    training, held_out = split_samples(samples, 0.001, seed=0)
    assert sorted(training + held_out) == [1, 2]
    assert training
    assert held_out


def test_every_epoch_sees_all_samples_in_its_own_order(samples: list[Sample]) -> None:
    indices = list(range(5, 200))
    first, second = (epoch_batches(indices, samples, 100, seed=4, epoch=epoch) for epoch in (0, 1))
    assert sorted(index for batch in first for index in batch) == indices
    assert first != second
    assert first == epoch_batches(indices, samples, 100, seed=4, epoch=0)
    sizes = [sum(num_rows_of(samples[index]) for index in batch) for batch in first]
    assert all(100 <= size < 100 + max(map(num_rows_of, samples)) for size in sizes[:-1])
