"""What the ranks of a worker do together: rank 0 leads, the others follow.

All ranks load the model and check it by the same calls. After that, only rank 0 has requests. It sends each step's
numbers to the followers before it computes its own part, and reads and writes their KV in shared memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from baton.engine.batch.attention_groups import Span
from baton.engine.batch.batch import ForwardBatch, ModelInput
from baton.engine.batch.hidden_states import HiddenStates
from baton.engine.device.uploads import TORCH_DTYPES
from baton.engine.kv_cache.shared_tensors import Address, SharedTensors, open_tensor
from baton.engine.parallel.channel import Inbox, run_messages
from baton.engine.parallel.followers import Followers
from baton.engine.parallel.group import RankGroup
from baton.engine.runner.forward_pass import ForwardPass

if TYPE_CHECKING:
    from baton.engine.runner.model_runner import ModelRunner

_FORWARD, _MOVE, _CAPTURE, _SHARE = "forward", "move", "capture", "share"


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
        self._followers.send((_FORWARD, batch.host_ints, batch.spans, batch.has_device_tokens))
        try:
            if batch.has_device_tokens:
                self._group.broadcast(batch.token_ids)
            return self.inner.forward(batch)
        except Exception as error:
            raise self._followers.lost(error) from error

    def close(self) -> None:
        self.inner.close()


class Leader:
    """Rank 0's part of what all ranks do beside steps."""

    def __init__(self, runner: ModelRunner, followers: Followers, group: RankGroup) -> None:
        self._followers = followers
        runner.forward_pass = LeadingForward(runner.forward_pass, followers, group)
        runner.spec = runner.loaded.whole_spec(runner.spec)
        addresses: list[list[Address]] = followers.ask((_SHARE,))
        others = [[open_tensor(address) for address in of_rank] for of_rank in addresses]
        runner.cache.add_ranks(runner.spec, runner.loaded.heads, others, self._move)

    def capture(self, max_num_seqs: int, max_draft_tokens: int, max_model_len: int) -> None:
        """Makes the followers do what ``ModelRunner.capture_graphs`` does next in this process."""
        self._followers.send((_CAPTURE, max_num_seqs, max_draft_tokens, max_model_len))

    def _move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._followers.send((_MOVE, list(sources), list(targets)))


class Follower:
    """What a follower does for rank 0.

    Args:
        tensors: allocated the tensors of the runner's cache.
    """

    def __init__(self, runner: ModelRunner, tensors: SharedTensors, group: RankGroup) -> None:
        self._runner = runner
        self._tensors = tensors
        self._group = group

    def run(self, inbox: Inbox) -> None:
        """Follows until rank 0 ends."""
        handlers = {_FORWARD: self._forward, _MOVE: self._move, _CAPTURE: self._capture, _SHARE: self._share}
        run_messages(inbox, handlers)

    @torch.inference_mode()
    def _forward(self, host_ints: npt.NDArray[np.int64], spans: Sequence[Span], has_device_tokens: bool) -> None:  # noqa: FBT001
        runner = self._runner
        dtype = TORCH_DTYPES[runner.spec.dtype]
        given = ModelInput.of(host_ints, spans, runner.spec.block_size, runner.device, dtype)
        if has_device_tokens:
            self._group.broadcast(given.token_ids)
        runner.local_pass.forward(given)

    def _move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._runner.cache.move(sources, targets)

    def _capture(self, max_num_seqs: int, max_draft_tokens: int, max_model_len: int) -> None:
        self._runner.capture_graphs(max_num_seqs, max_draft_tokens, max_model_len)

    def _share(self) -> list[Address]:
        cache = self._runner.cache
        pairs = zip(cache.keys, cache.values, strict=True)
        return [self._tensors.address_of(tensor) for pair in pairs for tensor in pair]
