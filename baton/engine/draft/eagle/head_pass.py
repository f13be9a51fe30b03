"""A pass of an EAGLE head over rows in the paged cache: by its own modules, or as a compiled program."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import torch

from baton.core.errors import NotFusableError
from baton.engine.attention.base import AttentionBackend
from baton.engine.batch.attention_groups import Span
from baton.engine.device.uploads import upload_ints
from baton.engine.draft.eagle.head import EagleHead
from baton.engine.draft.rows import DraftRows, PagedAttend
from baton.engine.kv_cache.paged_cache import PagedKVCache
from baton.engine.runner.model_runner import ModelRunner

logger = logging.getLogger(__name__)


class HeadPass(Protocol):
    """Computes rows of a head and stores their KV."""

    def run(
        self, spans: Sequence[Span], token_ids: Sequence[int], hidden: torch.Tensor, *, only_last: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes rows and stores their KV.

        Args:
            spans: places of the rows, a span for each sequence.
            token_ids: the target's token id of each row.
            hidden: ``[num_rows, hidden_size]``, from :meth:`~.head.EagleHead.fuse` or from an earlier pass.
            only_last: returns only the results of each span's last row.

        Returns:
            The hidden states for the next pass, ``[num_results, hidden_size]``, and logits
            ``[num_results, draft_vocab_size]``.
        """
        ...


class ModuleHeadPass:
    """Implements :class:`HeadPass` for every head.

    Args:
        backend: attention over ``cache``.
        first_layer: index of the head's first layer in the cache.
    """

    def __init__(self, head: EagleHead, cache: PagedKVCache, backend: AttentionBackend, first_layer: int) -> None:
        self._head = head
        self._cache = cache
        self._backend = backend
        self._first_layer = first_layer

    def run(
        self, spans: Sequence[Span], token_ids: Sequence[int], hidden: torch.Tensor, *, only_last: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.rows(spans)
        tokens = upload_ints(token_ids, hidden.device)
        attend = PagedAttend(self._backend, rows, self._first_layer)
        fed, normed = self._head(tokens, hidden, rows.positions, attend)
        if only_last and len(rows.last) < len(token_ids):
            last = upload_ints(rows.last, hidden.device)
            fed, normed = fed.index_select(0, last), normed.index_select(0, last)
        return fed, self._head.logits(normed)

    def write(self, spans: Sequence[Span], token_ids: Sequence[int], hidden: torch.Tensor) -> None:
        """Writes only the rows' KV. A head of one layer needs no attention for it."""
        if not self._head.is_local:
            self.run(spans, token_ids, hidden, only_last=True)
            return
        rows = self.rows(spans)
        tokens = upload_ints(token_ids, hidden.device)
        keys, values = self._head.keys_values(tokens, hidden, rows.positions)
        self._cache.write(self._first_layer, rows.slots, keys, values)

    def rows(self, spans: Sequence[Span]) -> DraftRows:
        """Builds the rows of a pass."""
        keys = self._cache.keys[self._first_layer]
        return DraftRows.build(spans, self._cache.spec.block_size, self._cache.device, keys.dtype)


def create_head_pass(head: EagleHead, runner: ModelRunner, modules: ModuleHeadPass, weights: str = "auto") -> HeadPass:
    """Creates the compiled program if the target is computed by one and supports the head, else returns ``modules``.

    Args:
        weights: format of the program's weights, see :class:`baton.engine.draft.eagle.compiled_pass.FusedHeadPass`.
    """
    if not runner.is_fused:
        return modules
    try:
        from baton.engine.draft.eagle.compiled_pass import FusedHeadPass  # needs numba, which not every platform has

        return FusedHeadPass(head, runner.cache, len(runner.spec.layers), weights)
    except NotFusableError as reason:
        logger.info("the draft head runs in PyTorch instead of the compiled pass: %s", reason)
        return modules
