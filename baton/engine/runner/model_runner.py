"""The device side of the engine: the model, its cache, and one forward at a time."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

import torch

from baton.core.drafts import ScheduledSequence
from baton.core.errors import ConfigError
from baton.core.kv_spec import KVEncoding
from baton.engine.attention.backends import create_backend
from baton.engine.attention.base import AttentionBackend
from baton.engine.batch.batch import ForwardBatch
from baton.engine.batch.hidden_states import HiddenStates
from baton.engine.contracts import DraftNetwork
from baton.engine.device.uploads import TORCH_DTYPES
from baton.engine.kv_cache.paged_cache import Allocator, PagedKVCache, slot_of
from baton.engine.models.model_loader import LoadedModel
from baton.engine.parallel.followers import Followers
from baton.engine.runner.cuda_graphs import GraphedForward, GraphFailure, make_buckets
from baton.engine.runner.forward_choice import create_forward_pass
from baton.engine.runner.forward_pass import ForwardPass, TransformersForward
from baton.engine.runner.graph_recorder import CudaGraphRecorder, Recorder
from baton.engine.runner.leader import CAPTURE, LeadingForward, share_cache
from baton.engine.runner.options import RunnerOptions

if TYPE_CHECKING:
    from baton.engine.cpu.decoder import FusedDecoder

logger = logging.getLogger(__name__)


class ModelRunner:
    """Runs a loaded model over a paged cache.

    Args:
        loaded: the model.
        num_blocks: size of the cache.
        block_size: tokens per block.
        options: how the model is computed.
        draft: keeps its KV in the same blocks, after the model's layers, and reads the model's hidden states.
        recorder: records CUDA graphs; ``None`` takes CUDA's own on CUDA.
        allocate: allocates the tensors of the cache.

    Attributes:
        local_pass: computes the model, or this rank's part of it.
        forward_pass: the same, on all ranks after :meth:`lead`.
        backend: attention for networks other than the model.

    Raises:
        ConfigError: the attention backend is unknown, or the model was loaded with other weights.
        UnsupportedModelError: the options require the fused decoder, which does not support the model; or the cache
            cannot encode its vectors.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        num_blocks: int,
        block_size: int,
        options: RunnerOptions | None = None,
        draft: DraftNetwork | None = None,
        recorder: Recorder | None = None,
        allocate: Allocator | None = None,
    ) -> None:
        self._options = options = options or RunnerOptions()
        weights = options.weights
        if (weights == "fp8") != (loaded.weights == "fp8"):
            raise ConfigError(f"engine.weights is {weights}, but the model was loaded with {loaded.weights} weights.")
        self.loaded = loaded
        self.device = loaded.model.device
        self.spec = loaded.kv_spec(block_size, weights, KVEncoding(options.kv_cache))
        if draft is not None:
            self.spec = self.spec.with_draft(draft.fingerprint(), draft.layer_specs)
        if options.cuda_graphs == "auto" and recorder is None and self.device.type == "cuda":
            recorder = CudaGraphRecorder()
        recorder = None if options.cuda_graphs == "off" else recorder
        self.cache = PagedKVCache(self.spec, num_blocks, self.device, scratch=recorder is not None, allocate=allocate)
        self.backend = self.create_backend(self.cache)
        layers_read = () if draft is None else draft.feature_layers
        self.local_pass: ForwardPass = create_forward_pass(
            loaded, self.cache, self.backend, options.decoder, layers_read, recorder
        )
        self.forward_pass: ForwardPass = self.local_pass
        self._followers: Followers | None = None

    def lead(self, followers: Followers) -> None:
        """Makes this runner compute on all ranks from now on, and its cache hold the KV of all.

        Raises:
            DeviceLostError: a follower failed.
        """
        if self.loaded.group is None:
            raise ValueError("only a model that is divided among ranks has followers")
        share_cache(self.cache, self.loaded, followers)
        self.spec = self.cache.spec
        self.forward_pass = LeadingForward(self.local_pass, followers, self.loaded.group)
        self._followers = followers

    def create_backend(self, cache: PagedKVCache) -> AttentionBackend:
        """Creates the attention backend of this runner's options over a cache."""
        return create_backend(self._options.attention_backend, cache)

    @property
    def features(self) -> HiddenStates | None:
        """The last forward's hidden states that the draft reads; ``None`` without such a draft."""
        return self.forward_pass.features

    @property
    def is_fused(self) -> bool:
        """Whether the fused decoder computes the model."""
        return not isinstance(self.local_pass, TransformersForward | GraphedForward)

    @property
    def has_tiles(self) -> bool:
        """Whether the fused decoder uses a CPU's matrix unit, so that a prompt slows decoding little."""
        return cast("FusedDecoder", self.local_pass).has_tiles if self.is_fused else False

    @property
    def num_graphs(self) -> int:
        """Number of recorded graphs."""
        return self.local_pass.num_graphs if isinstance(self.local_pass, GraphedForward) else 0

    @property
    def graph_failure(self) -> GraphFailure | None:
        """Why :meth:`capture_graphs` recorded nothing; ``None`` where it recorded all, or had none to record."""
        return self.local_pass.failure if isinstance(self.local_pass, GraphedForward) else None

    @property
    def forward_waits(self) -> bool:
        """Whether :meth:`capture_graphs` found that the model's forward waits for the device."""
        return self.graph_failure is not None and self.graph_failure.forward_waits

    def capture_graphs(self, max_num_seqs: int, max_draft_tokens: int, max_model_len: int) -> None:
        """Records decode and verification steps if options and backend allow it. Takes seconds; nothing else may run.

        A failure is logged and kept in :attr:`graph_failure`; all steps are then computed without graphs.

        Args:
            max_num_seqs: limit of a step.
            max_draft_tokens: limit of a sequence and step.
            max_model_len: limit for the tokens of a sequence.

        Raises:
            Exception: the device is lost; its own error is raised.
        """
        if isinstance(self.local_pass, GraphedForward):
            if self._followers is not None:
                self._followers.send((CAPTURE, max_num_seqs, max_draft_tokens, max_model_len))
            self.local_pass.capture(make_buckets(max_num_seqs, max_draft_tokens), max_model_len)
            logger.info("recorded %d CUDA graphs", self.num_graphs)

    def close(self) -> None:
        """Frees the cache's memory. Nothing may run here afterwards; the model itself stays usable."""
        self.cache.keys.clear()
        self.cache.values.clear()
        self.forward_pass.close()

    def build_batch(self, plan: list[ScheduledSequence]) -> ForwardBatch:
        return ForwardBatch.build(plan, self.spec.block_size, self.device, TORCH_DTYPES[self.spec.dtype])

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Computes the batch and stores its KV.

        Returns:
            Logits, float32 ``[num_rows, vocab_size]``, of ``batch.logit_rows``.
        """
        return self.forward_pass.forward(batch)

    def wait_for_device(self) -> None:
        """Returns when the device has computed everything. Not needed after reading the step's tokens."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def keep_accepted(self, batch: ForwardBatch, nodes_of: Mapping[str, Sequence[int]]) -> None:
        """Moves the KV of accepted tree nodes to the final places of their tokens in the sequence.

        Args:
            nodes_of: the accepted path through the sequence's draft, by request id.
        """
        sources: list[int] = []
        targets: list[int] = []
        size = self.spec.block_size
        for sequence in batch.sequences:
            request = sequence.request
            base = request.num_computed_tokens + sequence.num_tokens
            for place, node in enumerate(nodes_of.get(request.request_id, ())):
                if node != place:
                    sources.append(slot_of(request.block_ids, base + node, size))
                    targets.append(slot_of(request.block_ids, base + place, size))
        if sources:
            self.cache.move(sources, targets)
