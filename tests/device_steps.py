"""Steps of tiny models on a fake device, with attention as the Triton backend launches it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
import torch
from transformers import PreTrainedModel

from baton.core.drafts import Draft, ScheduledSequence
from baton.core.request import Request, SamplingParams
from baton.engine.attention import triton_paged
from baton.engine.attention.paged_plan import PlannedBatch, PlanSize, StaticPlan
from baton.engine.attention.triton_paged import TritonPaged
from baton.engine.batch.batch import ForwardBatch
from baton.engine.device.uploads import TORCH_DTYPES
from baton.engine.kv_cache.paged_cache import PagedKVCache
from baton.engine.models.model_loader import LoadedModel, prepare_model
from baton.engine.runner.forward_pass import TransformersForward
from tests.triton_launches import Launches

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class KernelLaunches:
    """Launches of the attention kernels."""

    attend: Launches
    merge: Launches


@contextmanager
def without_kernels() -> Iterator[KernelLaunches]:
    """In this context Triton's kernels are recorded instead of run, so that the backend works on every device."""
    with pytest.MonkeyPatch.context() as patch:
        launches = KernelLaunches(Launches(triton_paged.attend), Launches(triton_paged.merge))
        patch.setattr(triton_paged, "attend", launches.attend)
        patch.setattr(triton_paged, "merge", launches.merge)
        patch.setattr("baton.engine.runner.model_runner.create_backend", lambda name, cache: TritonPaged(cache))
        yield launches


def prepared(model: PreTrainedModel) -> LoadedModel:
    """The model in float32 on the CPU, without the changes that are made only for some CPUs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("baton.engine.models.model_loader.speed_up_products", lambda network, device: None)
        return prepare_model(model, "float32")


def on_device(loaded: LoadedModel) -> LoadedModel:
    """The same model on the meta device in bfloat16."""
    loaded.model.to("meta", torch.bfloat16)
    return replace(loaded, dtype_name="bfloat16")


class Steps:
    """Makes steps of one model with its own cache.

    Args:
        num_blocks: size of the cache.
        num_programs: see :class:`baton.engine.attention.triton_paged.TritonPaged`.
    """

    def __init__(self, loaded: LoadedModel, num_blocks: int = 64, num_programs: int | None = None) -> None:
        self.loaded = loaded
        self.device = loaded.model.device
        self.cache = PagedKVCache(loaded.kv_spec(BLOCK_SIZE), num_blocks, self.device, scratch=True)
        backend = TritonPaged(self.cache, num_programs=num_programs)
        self.forward_pass = TransformersForward(loaded, backend)
        self._sharing = backend.key_sharing

    def recorded(self, num_seqs: int, tokens_per_seq: int, max_keys: int = 64) -> Callable[[], torch.Tensor]:
        """The step that a graph of this bucket runs, without the copy of the logits; with drafts, its plan has trees.

        Args:
            max_keys: maximum number of keys of a sequence.
        """
        count = num_seqs * tokens_per_seq
        size = PlanSize(num_seqs + 1, count, max_keys // BLOCK_SIZE, tokens_per_seq - 1)
        plan = StaticPlan(size, tokens_per_seq, BLOCK_SIZE, self.cache.num_blocks, self.device, self._sharing)
        ids = torch.zeros(count, dtype=torch.int64, device=self.device)
        rows = torch.arange(count, device=self.device)
        batch = PlannedBatch(ids + self.cache.num_blocks * BLOCK_SIZE, plan.plan)
        return torch.inference_mode()(lambda: self.forward_pass.compute(ids, ids, rows, batch))

    def eager(self, *lengths: tuple[int, int], draft: Draft | None = None) -> Callable[[], torch.Tensor]:
        """A step without a graph.

        Args:
            lengths: for each sequence, its number of tokens and how many of them are new.
            draft: draft of the first sequence.
        """
        plan = []
        for index, (known, new) in enumerate(lengths):
            blocks = list(range(16 * index, 16 * index + 16))
            request = Request(
                str(index), [3] * known, SamplingParams(), num_computed_tokens=known - new, block_ids=blocks
            )
            plan.append(ScheduledSequence(request, new, draft if draft and not index else Draft()))
        batch = ForwardBatch.build(plan, BLOCK_SIZE, self.device, TORCH_DTYPES[self.loaded.dtype_name])
        return torch.inference_mode()(lambda: self.forward_pass.forward(batch))
