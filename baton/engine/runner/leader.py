"""Rank 0 of a worker whose model is divided: it tells the others what to compute, and computes its own part.

All ranks load the model and check it by the same calls. After that, only rank 0 has requests. It sends each step's
numbers to the followers before it computes, and reads and writes their KV in shared memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from baton.engine.batch.batch import ForwardBatch
from baton.engine.batch.hidden_states import HiddenStates
from baton.engine.kv_cache.paged_cache import PagedKVCache
from baton.engine.kv_cache.shared_tensors import Address, OpenedTensors
from baton.engine.models.model_loader import LoadedModel
from baton.engine.parallel.followers import Followers
from baton.engine.parallel.group import RankGroup
from baton.engine.runner.forward_pass import ForwardPass

FORWARD, MOVE, CAPTURE, SHARE = "forward", "move", "capture", "share"
"""Messages to followers, see :class:`baton.engine.runner.follower.Follower`."""


class LeadingForward:
    """Implements ``ForwardPass`` on rank 0.

    Args:
        inner: computes this rank's part.
    """

    def __init__(self, inner: ForwardPass, followers: Followers, group: RankGroup) -> None:
        self.inner = inner
        self._followers = followers
        self._group = group

    @property
    def features(self) -> HiddenStates | None:
        return self.inner.features

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Raises :class:`DeviceLostError` after any failure: the followers are in the middle of the step then."""
        self._followers.send((FORWARD, batch.host_ints, batch.spans, batch.has_device_tokens))
        try:
            if batch.has_device_tokens:
                self._group.broadcast(batch.token_ids)
            return self.inner.forward(batch)
        except Exception as error:
            raise self._followers.lost(error) from error

    def close(self) -> None:
        self.inner.close()


def share_cache(cache: PagedKVCache, loaded: LoadedModel, followers: Followers) -> None:
    """Makes rank 0's cache that of all ranks.

    Raises:
        DeviceLostError: a follower failed.
    """
    addresses: list[list[Address]] = followers.ask((SHARE,))
    opened = OpenedTensors()
    others = [[opened.open(address) for address in of_rank] for of_rank in addresses]

    def move(sources: Sequence[int], targets: Sequence[int]) -> None:
        followers.send((MOVE, list(sources), list(targets)))

    cache.add_ranks(loaded.whole_spec(cache.spec), loaded.heads, others, move)
    followers.on_failure = lambda error: cache.on_copy_error(error)  # an idle engine notices too
