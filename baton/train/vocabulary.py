"""The draft vocabulary: the target's most frequent tokens, so that the draft's lm_head stays small."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch

from baton.core.errors import ConfigError
from baton.train.dataset import Sample


def count_answer_tokens(samples: Iterable[Sample]) -> Counter[int]:
    """Counts each token in the answers."""
    counts: Counter[int] = Counter()
    for sample in samples:
        counts.update(sample.token_ids[sample.num_prompt_tokens :])
    return counts


def choose_vocabulary(
    counts: Counter[int], size: int, choices: Iterable[int], always: Iterable[int] = ()
) -> torch.Tensor:
    """The target's ids of the draft vocabulary, ascending, int64 ``[size]``.

    Args:
        size: number of tokens, limited to the number of ``choices``.
        choices: the ids that may be chosen.
        always: those of the choices that are always included, for example the ids that end a turn.

    Raises:
        ConfigError: ``always`` has more than ``size`` ids.
    """
    possible = set(choices)
    size = min(size, len(possible))
    chosen = possible.intersection(always)
    if len(chosen) > size:
        raise ConfigError(
            f"training: a draft vocabulary of {size} tokens is too small for the {len(chosen)} tokens that end a "
            "turn. Raise draft_vocab_size."
        )
    # Of tokens that the data does not have, the lowest ids are first: tokenizers learn frequent merges first.
    others = sorted(possible - chosen, key=lambda token: (-counts[token], token))
    return torch.tensor(sorted(chosen.union(others[: size - len(chosen)])), dtype=torch.int64)


def offsets_of(target_ids: torch.Tensor) -> torch.Tensor:
    """``d2t``: the offset from each draft id to the target's id."""
    return target_ids - torch.arange(len(target_ids))


def draft_ids_of(target_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The draft id of each of the target's ids, or -1, int64 ``[vocab_size]``."""
    found = torch.full((vocab_size,), -1, dtype=torch.int64)
    found[target_ids] = torch.arange(len(target_ids))
    return found


def coverage(counts: Counter[int], target_ids: torch.Tensor) -> float:
    """The share of the answers' tokens that are in the draft vocabulary."""
    total = sum(counts.values())
    return sum(counts[token] for token in target_ids.tolist()) / total if total else 0.0
