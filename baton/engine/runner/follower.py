"""What a follower does: it builds the same runner as rank 0, and computes its part of each step."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from baton.engine.batch.attention_groups import Span
from baton.engine.batch.batch import ModelInput
from baton.engine.device.uploads import TORCH_DTYPES
from baton.engine.kv_cache.shared_tensors import Address, SharedTensors
from baton.engine.parallel.channel import Inbox, run_messages
from baton.engine.parallel.group import EXCHANGE_TIMEOUT_S, RankGroup, join_ranks, reach_store
from baton.engine.runner.cuda_graphs import GraphedForward
from baton.engine.runner.forward_pass import TransformersForward
from baton.engine.runner.leader import CAPTURE, FORWARD, MOVE, SHARE
from baton.engine.runner.model_runner import ModelRunner


class Follower:
    """What a follower does for rank 0.

    Args:
        tensors: allocated the tensors of the runner's cache.
    """

    def __init__(self, runner: ModelRunner, tensors: SharedTensors, group: RankGroup) -> None:
        if not isinstance(runner.local_pass, TransformersForward | GraphedForward):
            raise TypeError("only the model's own modules compute a part of it")
        self._runner = runner
        self._pass = runner.local_pass
        self._tensors = tensors
        self._group = group

    def run(self, inbox: Inbox) -> None:
        """Follows until rank 0 ends."""
        handlers: dict[str, Callable[..., object]] = {
            FORWARD: self._forward,
            MOVE: self._move,
            CAPTURE: self._capture,
            SHARE: self._share,
        }
        run_messages(inbox, handlers)

    @torch.inference_mode()
    def _forward(self, host_ints: npt.NDArray[np.int64], spans: Sequence[Span], has_device_tokens: bool) -> None:
        runner = self._runner
        dtype = TORCH_DTYPES[runner.spec.dtype]
        given = ModelInput.of(host_ints, spans, runner.spec.block_size, runner.device, dtype)
        if has_device_tokens:
            self._group.broadcast(given.token_ids)
        self._pass.forward(given)

    def _move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._runner.cache.move(sources, targets)

    def _capture(self, max_num_seqs: int, max_draft_tokens: int, max_model_len: int) -> None:
        self._runner.capture_graphs(max_num_seqs, max_draft_tokens, max_model_len)

    def _share(self) -> list[Address]:
        cache = self._runner.cache
        pairs = zip(cache.keys, cache.values, strict=True)
        return [self._tensors.address_of(tensor) for pair in pairs for tensor in pair]


def follow(inbox: Inbox, rank: int, size: int, port: int, device_type: str, builder: str, argument: object) -> None:
    """Joins the ranks, builds the runner that rank 0 asks for, and follows until rank 0 ends.

    Args:
        builder, argument: see :meth:`baton.engine.parallel.followers.Followers.start`.
    """
    device = device_of(rank, device_type)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    group = join_ranks(rank, size, reach_store(port, size, EXCHANGE_TIMEOUT_S), device, EXCHANGE_TIMEOUT_S)
    module_name, _, function_name = builder.partition(":")
    build: Any = getattr(importlib.import_module(module_name), function_name)
    tensors = SharedTensors()
    runner = build(argument, group, device, tensors.allocate)
    inbox.done()
    Follower(runner, tensors, group).run(inbox)


def device_of(rank: int, device_type: str) -> torch.device:
    """The device of a rank: the GPUs that Ray granted, in their order, or the CPU."""
    return torch.device("cuda", rank) if device_type == "cuda" else torch.device(device_type)
