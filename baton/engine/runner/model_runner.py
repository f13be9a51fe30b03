"""Everything that happens on the device: the model, its cache, and one forward at a time."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

import torch

from baton.core.drafts import Draft, ScheduledSequence
from baton.core.errors import ConfigError, NotFusableError, UnsupportedModelError
from baton.core.kv_spec import KVEncoding
from baton.core.request import Request, SamplingParams
from baton.engine.attention.backends import create_backend
from baton.engine.batch.batch import ForwardBatch
from baton.engine.batch.hidden_states import HiddenStates
from baton.engine.contracts import DraftNetwork
from baton.engine.device.uploads import TORCH_DTYPES, upload_ints
from baton.engine.kv_cache.block_manager import BlockManager
from baton.engine.kv_cache.paged_cache import PagedKVCache, slot_of
from baton.engine.models.model_loader import LoadedModel, check_tokens, own_logits, relative_distance
from baton.engine.runner.cuda_graphs import CUDA_GRAPHS, GraphedForward, GraphFailure, make_buckets
from baton.engine.runner.forward_pass import (
    DECODER_OF_WEIGHTS,
    DECODERS,
    WEIGHTS,
    ForwardPass,
    TransformersForward,
    create_fused,
)
from baton.engine.runner.graph_recorder import CudaGraphRecorder, Recorder

if TYPE_CHECKING:
    from baton.engine.cpu.decoder import FusedDecoder
    from baton.engine.cpu.stage_clock import StageClock

logger = logging.getLogger(__name__)

KV_CACHES = tuple(KVEncoding)
_CHECK_CHUNKS = (7, 4, 1, 1)
# Relative error of the logits, by dtype, above which the paged path computes something else than the model does.
# Rounding stays an order of magnitude below; a lost state, mask or position is an order of magnitude above.
_CHECK_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.05}
# Of quantized weights, in any dtype: what a trained model loses by them stays far below.
_QUANTIZED_TOLERANCE = 0.25
# Of KV that was kept or has travelled in a lossy encoding, in any dtype.
_ENCODED_TOLERANCE = 0.1
_NUM_ENCODED, _NUM_BEHIND = 56, 8
_FAR_POSITION = 32768
# What running a model may fail with when it is not what it seems.
_FAILURES = (ValueError, TypeError, RuntimeError, LookupError, AttributeError)


class ModelRunner:
    """Runs a loaded model over a paged cache.

    Args:
        loaded: the model.
        num_blocks: size of the cache.
        block_size: tokens per block.
        attention_backend: name, see ``attention/registry.py``.
        draft: keeps its KV in the same blocks, behind the model's layers, and reads the model's hidden states.
        decoder: what computes the model: ``transformers``: its own modules; ``fused``: one compiled program, on the
            CPU, for models of the Llama family; ``auto``: that where it can, else its own modules.
        weights: ``native``: as the model has them; ``int8``, ``int4``: see ``quantization``; only the
            fused decoder computes those; ``fp8``: as the model has them that was loaded so, by its own modules.
        cuda_graphs: ``auto``: :meth:`capture_graphs` records steps, on CUDA, where the model's own modules compute them
            with a backend that reads the block table; ``off``: it does nothing.
        recorder: records them; None: CUDA's own.
        kv_cache: ``native``: keys and values are kept as the model makes them; ``int8``: see ``kv_int8``.

    Attributes:
        backend: attention for networks beside the model.

    Raises:
        ConfigError: ``decoder``, ``weights``, ``attention_backend``, ``cuda_graphs`` or ``kv_cache`` is unknown, or
            they do not go together.
        UnsupportedModelError: ``fused``, or what needs it, was asked for and does not know the model; or the cache
            cannot keep its vectors so.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        num_blocks: int,
        block_size: int,
        attention_backend: str = "auto",
        draft: DraftNetwork | None = None,
        decoder: str = "auto",
        weights: str = "native",
        cuda_graphs: str = "auto",
        recorder: Recorder | None = None,
        kv_cache: str = KVEncoding.NATIVE,
    ) -> None:
        if decoder not in DECODERS:
            raise ConfigError(f"engine.decoder is {decoder!r}, but it must be one of: {', '.join(DECODERS)}.")
        if weights not in WEIGHTS:
            raise ConfigError(f"engine.weights is {weights!r}, but it must be one of: {', '.join(WEIGHTS)}.")
        if cuda_graphs not in CUDA_GRAPHS:
            raise ConfigError(
                f"engine.cuda_graphs is {cuda_graphs!r}, but it must be one of: {', '.join(CUDA_GRAPHS)}."
            )
        if kv_cache not in KV_CACHES:
            raise ConfigError(f"engine.kv_cache is {kv_cache!r}, but it must be one of: {', '.join(KV_CACHES)}.")
        needed = DECODER_OF_WEIGHTS.get(weights, decoder)
        if decoder not in ("auto", needed):
            raise ConfigError(f"engine.weights is {weights}, which needs engine.decoder: {needed} or auto.")
        if (weights == "fp8") != (loaded.weights == "fp8"):
            raise ConfigError(f"engine.weights is {weights}, but the model was loaded with {loaded.weights} weights.")
        self.loaded = loaded
        self.device = loaded.model.device
        self.spec = loaded.kv_spec(block_size, weights, KVEncoding(kv_cache))
        if draft is not None:
            self.spec = self.spec.with_draft(draft.fingerprint(), draft.layer_specs)
        if cuda_graphs == "auto" and recorder is None and self.device.type == "cuda":
            recorder = CudaGraphRecorder()
        self._recorder = None if cuda_graphs == "off" else recorder
        self.cache = PagedKVCache(self.spec, num_blocks, self.device, scratch=self._recorder is not None)
        self._attention_backend = attention_backend
        self.backend = create_backend(attention_backend, self.cache)
        layers_read = () if draft is None else draft.feature_layers
        self._forward_pass = self._create_pass(decoder, layers_read)

    @property
    def features(self) -> HiddenStates | None:
        """The hidden states that the draft asked for, of the last forward; None when it asked for none."""
        return self._forward_pass.features

    @property
    def is_fused(self) -> bool:
        """Whether the fused decoder computes the model."""
        return not isinstance(self._forward_pass, TransformersForward | GraphedForward)

    @property
    def has_tiles(self) -> bool:
        """Whether the fused decoder computes by a CPU's matrix unit, so that a prompt costs little beside decoding."""
        return cast("FusedDecoder", self._forward_pass).has_tiles if self.is_fused else False

    def watch_stages(self) -> StageClock | None:
        """Has all later steps note when the fused decoder's stages are done; None where something else computes."""
        return cast("FusedDecoder", self._forward_pass).watch_stages() if self.is_fused else None

    @property
    def num_graphs(self) -> int:
        """Recorded ones."""
        return self._forward_pass.num_graphs if isinstance(self._forward_pass, GraphedForward) else 0

    @property
    def graph_failure(self) -> GraphFailure | None:
        """Why :meth:`capture_graphs` recorded nothing; ``None`` where it recorded all, or was not to record any."""
        return self._forward_pass.failure if isinstance(self._forward_pass, GraphedForward) else None

    @property
    def forward_waits(self) -> bool:
        """Whether :meth:`capture_graphs` found that the model's forward waits for the device."""
        return self.graph_failure is not None and self.graph_failure.forward_waits

    def capture_graphs(self, max_num_seqs: int, max_draft_tokens: int, max_model_len: int) -> None:
        """Records decode and verification steps where that is possible and wanted. Takes seconds; nothing else may run.

        A failure is logged and kept in :attr:`graph_failure`; all steps are then computed without graphs.

        Args:
            max_num_seqs: of a step.
            max_draft_tokens: of a sequence and step.
            max_model_len: tokens of a sequence.

        Raises:
            Exception: whatever the device raises when it is lost.
        """
        if isinstance(self._forward_pass, GraphedForward):
            self._forward_pass.capture(make_buckets(max_num_seqs, max_draft_tokens), max_model_len)
            logger.info("%d CUDA graphs are recorded", self.num_graphs)

    def close(self) -> None:
        """Gives the cache's memory back. Nothing runs here afterwards; the model itself stays as usable as before."""
        self.cache.keys.clear()
        self.cache.values.clear()
        self._forward_pass.close()

    def _create_pass(self, decoder: str, feature_layers: Sequence[int]) -> ForwardPass:
        if "transformers" not in (decoder, DECODER_OF_WEIGHTS.get(self.spec.weights)):
            try:
                return self._create_fused(feature_layers)
            except NotFusableError as reason:
                if self.spec.weights != "native":
                    raise UnsupportedModelError(
                        f"engine.weights is {self.spec.weights}, which only the fused decoder computes, and it cannot "
                        f"compute {type(self.loaded.model).__name__}: {reason}. Set engine.weights: native."
                    ) from reason
                if decoder == "fused":
                    raise
                logger.info("%s is computed by transformers: %s", type(self.loaded.model).__name__, reason)
        modules = TransformersForward(self.loaded, self.backend, feature_layers)
        if self._recorder is None or not self.backend.takes_plans:
            return modules
        return GraphedForward(modules, self.cache, self._recorder)

    def _create_fused(self, feature_layers: Sequence[int]) -> ForwardPass:
        """Raises :class:`NotFusableError` also when results differ from the model's own, with its own weights."""
        if self.loaded.is_fusable:
            return create_fused(self.loaded, self.cache, feature_layers, self.spec.weights)
        length = sum(_CHECK_CHUNKS)
        cache, lossless = self.cache, self.loaded.kv_spec(self.spec.block_size)
        if self.spec.encoding is not KVEncoding.NATIVE:
            cache = PagedKVCache(lossless, -(-length // lossless.block_size), self.device)
        fused = create_fused(self.loaded, cache, feature_layers)
        far = min(self.loaded.max_model_len, _FAR_POSITION) - length
        try:
            # Far from the start too: there are models that scale queries by their position.
            error = max(self._relative_error(fused, first) for first in (0, max(0, far)))
        except _FAILURES as failure:
            error = float("inf")
            logger.debug("the comparison failed", exc_info=failure)
        if not error <= _CHECK_TOLERANCE[self.loaded.dtype_name]:
            fused.close()
            raise NotFusableError(f"the fused decoder gives other logits (relative error {error:.2g})")
        if cache is self.cache and self.spec.weights == "native":
            return fused
        fused.close()
        return create_fused(self.loaded, self.cache, feature_layers, self.spec.weights)

    def build_batch(self, plan: list[ScheduledSequence]) -> ForwardBatch:
        return ForwardBatch.build(plan, self.spec.block_size, self.device, TORCH_DTYPES[self.spec.dtype])

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Computes the batch and stores its KV.

        Returns:
            Logits, float32 ``[num_rows, vocab_size]``, of ``batch.logit_rows``.
        """
        return self._forward_pass.forward(batch)

    def wait_for_device(self) -> None:
        """Returns when all is computed. Who has read a step's tokens has waited for it already."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def keep_accepted(self, batch: ForwardBatch, nodes_of: Mapping[str, Sequence[int]]) -> None:
        """Moves the KV of accepted tree nodes to where their tokens come to stand in the sequence.

        Args:
            nodes_of: by request id, the accepted path through the sequence's draft.
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
            self.cache.move(upload_ints(sources, self.device), upload_ints(targets, self.device))

    def self_check(self) -> None:
        """Compares chunked, paged logits with those of the model's own attention over a short input.

        Catches whatever else a layer may remember between steps, whatever the cache loses. Costs a few short forwards.

        Raises:
            UnsupportedModelError: they differ by more than rounding, of quantized weights and KV too, explains.
        """
        weights, encoding, name = self.spec.weights, self.spec.encoding, type(self.loaded.model).__name__
        tolerance = _CHECK_TOLERANCE[self.loaded.dtype_name]
        is_lossless = weights == "native" and encoding is KVEncoding.NATIVE
        try:
            errors = [self._relative_error(self._forward_pass), self.loaded.weights_error]
            if encoding is not KVEncoding.NATIVE:
                errors.append(self._kept_error())
            # The fused decoder was compared with native weights and KV before it was taken.
            native_error = errors[0] if is_lossless else 0.0 if self.is_fused else self._native_error()
        except _FAILURES as failure:
            raise UnsupportedModelError(
                f"{name} fails over the paged cache: {type(failure).__name__}: {failure}"
            ) from failure
        if not native_error <= tolerance:
            raise UnsupportedModelError(
                f"{name} gives other logits over the paged cache than by itself (relative error {native_error:.2g}). "
                "Some of its layers keep state besides keys and values, or attend in a way that baton does not know. "
                "Set engine.self_check: false to serve it all the same."
            )
        allowed = tolerance if weights == "native" else _QUANTIZED_TOLERANCE
        causes: dict[str, str] = {}
        if weights != "native":
            causes["engine.weights"] = f"{weights} weights"
        if encoding is not KVEncoding.NATIVE:
            allowed += _ENCODED_TOLERANCE
            causes["engine.kv_cache"] = f"a KV cache of {encoding}"
        if all(error <= allowed for error in errors):
            return
        error = max(errors, key=lambda each: (each != each, each))  # what is no number is the worst
        raise UnsupportedModelError(
            f"{name} gives other logits with {' and '.join(causes.values())} (relative error {error:.2g}, where "
            f"{allowed:.2g} is allowed). Set {' or '.join(causes)} to native, or engine.self_check to false to serve "
            "it all the same."
        )

    def check_encoding(self, encoding: KVEncoding) -> None:
        """Compares logits behind KV that has been encoded and decoded again with those behind the same KV as it was.

        Costs a short forward and two shorter ones; overwrites the cache's first blocks.

        Raises:
            UnsupportedModelError: they differ by too much, as where a few numbers of a vector dwarf the others.
        """
        error = self.encoding_error(encoding)
        if not error <= _ENCODED_TOLERANCE:
            raise UnsupportedModelError(
                f"{type(self.loaded.model).__name__} gives other logits when its KV travels as {encoding} (relative "
                f"error {error:.2g}, where {_ENCODED_TOLERANCE:g} is allowed). Set kv_transfer.encoding: native, or "
                "engine.self_check: false to serve it all the same."
            )

    @torch.inference_mode()
    def encoding_error(self, encoding: KVEncoding) -> float:
        """Of the logits of some tokens behind others, whose KV alone was encoded."""
        token_ids = self._tokens_for_encoding()
        if token_ids is None:
            return 0.0
        behind = self._computed_but_for_the_last(token_ids)
        expected = self.forward(self.build_batch([behind])).clone()
        request = behind.request
        self.cache.pass_through(request.block_ids, request.num_computed_tokens, encoding)
        return relative_distance(self.forward(self.build_batch([behind])), expected)

    def _native_error(self) -> float:
        """Of the model's modules over a small cache that keeps keys and values as they are."""
        lossless = self.loaded.kv_spec(self.spec.block_size)
        cache = PagedKVCache(lossless, -(-sum(_CHECK_CHUNKS) // lossless.block_size), self.device)
        modules = TransformersForward(self.loaded, create_backend(self._attention_backend, cache))
        try:
            return self._relative_error(modules)
        finally:
            modules.close()

    @torch.inference_mode()
    def _kept_error(self) -> float:
        """The same of a cache that is encoded, against the model's own attention."""
        token_ids = self._tokens_for_encoding()
        if token_ids is None:
            return 0.0
        found = self.forward(self.build_batch([self._computed_but_for_the_last(token_ids)]))
        return relative_distance(found, own_logits(self.loaded.model, token_ids)[-_NUM_BEHIND:])

    def _tokens_for_encoding(self) -> list[int] | None:
        """As many as the cache and the model have room for; None when that is too few."""
        room = min(self.loaded.max_model_len, self.cache.num_blocks * self.spec.block_size)
        count = min(_NUM_ENCODED, room - _NUM_BEHIND)
        return check_tokens(count + _NUM_BEHIND, self.loaded.vocab_size) if count > 0 else None

    def _computed_but_for_the_last(self, token_ids: list[int]) -> ScheduledSequence:
        """Computes the first tokens; the others as a draft, since a step gives logits for all of its tokens."""
        count = len(token_ids) - _NUM_BEHIND
        request = Request("encoding-check", token_ids[: count + 1], SamplingParams())
        request.block_ids = list(range(-(-len(token_ids) // self.spec.block_size)))
        self.forward(self.build_batch([ScheduledSequence(request, count)]))
        request.num_computed_tokens = count
        return ScheduledSequence(request, 1, Draft(tuple(token_ids[count + 1 :])))

    def _relative_error(self, forward_pass: ForwardPass, first_position: int = 0) -> float:
        """Of the last logits of a short input, computed in chunks, against the model's own."""
        token_ids = check_tokens(sum(_CHECK_CHUNKS), self.loaded.vocab_size)
        paged = self._chunked_logits(forward_pass, token_ids, first_position)
        return relative_distance(paged, own_logits(self.loaded.model, token_ids, first_position)[-1:])

    @torch.inference_mode()
    def _chunked_logits(self, forward_pass: ForwardPass, token_ids: list[int], first_position: int) -> torch.Tensor:
        # The first blocks: the cache that is written to may have no more than are needed.
        needed = -(-len(token_ids) // self.spec.block_size)
        blocks = BlockManager(min(needed, self.cache.num_blocks), self.spec.block_size, prefix_caching=False)
        request = Request("self-check", token_ids, SamplingParams())
        blocks.grow(request, len(token_ids))
        for chunk in _CHECK_CHUNKS:
            batch = self.build_batch([ScheduledSequence(request, chunk)])
            batch.positions += first_position
            logits = forward_pass.forward(batch)
            request.num_computed_tokens += chunk
        return logits[-1:]
