"""The draft vocabulary: the tokens that the target says most often, so that the draft's lm_head stays small."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch

from baton.core.errors import ConfigError
from baton.train.dataset import Sample


def count_answer_tokens(samples: Iterable[Sample]) -> Counter[int]:
    """How often the target said each token."""
    counts: Counter[int] = Counter()
    for sample in samples:
        counts.update(sample.token_ids[sample.num_prompt_tokens :])
    return counts


def choose_vocabulary(counts: Counter[int], size: int, vocab_size: int, always: Iterable[int] = ()) -> torch.Tensor:
    """The target's ids of the draft vocabulary, ascending, int64 ``[size]``.

    Args:
        size: as many tokens; the whole vocabulary when it is no larger.
        always: ids that are in it however rare they are, those that end a turn for example.

    Raises:
        ConfigError: ``always`` alone does not fit.
    """
    size = min(size, vocab_size)
    chosen = set(always)
    if len(chosen) > size:
        raise ConfigError(
            f"training: a draft vocabulary of {size} tokens has no room for the {len(chosen)} that end a turn. "
            "Give draft_vocab_size a higher value."
        )
    by_frequency = sorted(counts, key=lambda token: (-counts[token], token))
    # Where the data has fewer, the lowest ids follow: tokenizers learn frequent merges first.
    for token in (*by_frequency, *range(vocab_size)):
        if len(chosen) >= size:
            break
        if token < vocab_size:
            chosen.add(token)
    return torch.tensor(sorted(chosen), dtype=torch.int64)


def offsets_of(target_ids: torch.Tensor) -> torch.Tensor:
    """``d2t``: what to add to each draft id to get the target's."""
    return target_ids - torch.arange(len(target_ids))


def draft_ids_of(target_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The draft id of each of the target's ids, -1 where there is none, int64 ``[vocab_size]``."""
    found = torch.full((vocab_size,), -1, dtype=torch.int64)
    found[target_ids] = torch.arange(len(target_ids))
    return found


def coverage(counts: Counter[int], target_ids: torch.Tensor) -> float:
    """The share of what the target said that the draft vocabulary can say."""
    total = sum(counts.values())
    return sum(counts[token] for token in target_ids.tolist()) / total if total else 0.0
