"""Random numbers of verification and drafting. Each purpose has a stream of its own at every position.

A position's coins and recovering draw decide its token once and for all, whatever the round; the draft's numbers at a
position may serve again in a later round, because nothing that was kept depends on them.

stream    0 (``PLAIN``)         1 (``RECOVER``)              2 + 2·j                3 + 2·j
purpose   plain, bonus token    token after a rejection      coin of sibling j      draw of sibling j by the draft
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from baton.engine.device.uploads import take_rows, upload
from baton.engine.sampling.logits import SamplingRow
from baton.engine.sampling.sampler import draw, uniform

PLAIN = 0
RECOVER = 1


def coin_stream(sibling: int) -> int:
    """Decides whether a node is accepted; ``sibling`` counts the node's earlier siblings."""
    return 2 + 2 * sibling


def draft_stream(sibling: int) -> int:
    """Draws a node; ``sibling`` counts the node's earlier siblings."""
    return 3 + 2 * sibling


def draw_from(probs: torch.Tensor, rows: Sequence[SamplingRow], stream: int) -> list[int]:
    """One token per row.

    Args:
        probs: ``[num_rows, vocab_size]``, none of them all 0; need not sum to 1.
        rows: whose seeds and positions key the noise.
        stream: one of this module's.
    """
    noise = [uniform(row.params.seed, row.position, stream) for row in rows]
    tokens: list[int] = draw(probs.double(), noise).tolist()
    return tokens


def draw_drafts(probs: torch.Tensor, rows: Sequence[SamplingRow], num_siblings: int = 1) -> list[list[int]]:
    """Draws what a draft guesses, so that :class:`~.acceptance_rules.ResidualRule` can verify it.

    Args:
        probs: ``[num_rows, vocab_size]``: the draft's logits behind ``process_logits`` with ``rows`` and
            a softmax. The same numbers go into ``Draft.probs``, once for each sibling.
        rows: ``baton.engine.sampling.verification.sampling_row`` of the drafted path so far.
        num_siblings: different tokens to draw for each row.

    Returns:
        For each row its tokens in the order in which they were drawn, which is that of their nodes; fewer than
        ``num_siblings`` where there are no more tokens of any probability.
    """
    left = probs.double()
    drawn: list[list[int]] = [[] for _ in rows]
    for sibling in range(num_siblings):
        able = [index for index, has_any in enumerate((left.sum(dim=-1) > 0).tolist()) if has_any]
        if not able:
            break
        tokens = draw_from(take_rows(left, able), [rows[index] for index in able], draft_stream(sibling))
        for index, token in zip(able, tokens, strict=True):
            drawn[index].append(token)
        if sibling + 1 < num_siblings:
            places = upload(np.array([able, tokens], dtype=np.int64), left.device).unbind()
            left = left.index_put(places, left.new_zeros(()))
    return drawn
