"""The draft vocabulary contains the most frequent tokens and the tokens that end a turn."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from baton.core.errors import ConfigError
from baton.train.dataset import Sample
from baton.train.vocabulary import choose_vocabulary, count_answer_tokens, coverage, draft_ids_of, offsets_of


def test_prompt_tokens_are_not_counted() -> None:
    counts = count_answer_tokens([Sample((9, 9, 9, 4, 5), 3), Sample((9, 5), 1)])
    assert counts == Counter({5: 2, 4: 1})


def test_the_most_frequent_tokens_are_chosen_in_ascending_order() -> None:
    counts = Counter({7: 5, 3: 9, 11: 5, 2: 1})
    assert choose_vocabulary(counts, 3, range(20)).tolist() == [3, 7, 11]


def test_end_of_turn_tokens_are_always_included() -> None:
    counts = Counter({7: 5, 3: 9, 11: 5, 2: 1})
    assert choose_vocabulary(counts, 3, range(20), always=(19, 2)).tolist() == [2, 3, 19]


def test_the_lowest_ids_fill_the_remaining_vocabulary() -> None:
    assert choose_vocabulary(Counter({7: 5}), 4, range(20)).tolist() == [0, 1, 2, 7]


def test_only_the_given_ids_are_chosen() -> None:
    counts = Counter({7: 5, 3: 9, 11: 5, 2: 1})
    assert choose_vocabulary(counts, 3, (19, 2, 7, 12), always=(4, 19)).tolist() == [2, 7, 19]


def test_a_small_vocabulary_is_kept_whole() -> None:
    chosen = choose_vocabulary(Counter({1: 1}), 100, range(6))
    assert chosen.tolist() == [0, 1, 2, 3, 4, 5]
    assert not offsets_of(chosen).any()


def test_a_vocabulary_too_small_for_end_of_turn_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"draft vocabulary of 1 tokens is too small for the 2.*draft_vocab_size"):
        choose_vocabulary(Counter(), 1, range(20), always=(1, 2))


def test_ids_map_in_both_directions() -> None:
    chosen = torch.tensor([2, 3, 19])
    assert (torch.arange(3) + offsets_of(chosen)).tolist() == [2, 3, 19]
    draft_ids = draft_ids_of(chosen, 20)
    assert draft_ids[chosen].tolist() == [0, 1, 2]
    assert int((draft_ids >= 0).sum()) == 3


def test_coverage_is_the_share_of_counted_tokens() -> None:
    assert coverage(Counter({1: 3, 2: 1}), torch.tensor([1])) == 0.75
    assert coverage(Counter(), torch.tensor([1])) == 0.0
