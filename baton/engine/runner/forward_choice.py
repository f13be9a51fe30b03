"""Chooses the forward pass of a model; compares it with the model's own modules unless they are known to agree."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from baton.core.drafts import ScheduledSequence
from baton.core.errors import NotFusableError, UnsupportedModelError
from baton.core.kv_spec import KVEncoding
from baton.core.request import Request, SamplingParams
from baton.engine.attention.base import AttentionBackend
from baton.engine.batch.batch import ForwardBatch
from baton.engine.device.uploads import TORCH_DTYPES
from baton.engine.kv_cache.block_manager import BlockManager
from baton.engine.kv_cache.paged_cache import PagedKVCache
from baton.engine.models.model_loader import LoadedModel, check_tokens, own_logits, relative_distance
from baton.engine.runner.cuda_graphs import GraphedForward
from baton.engine.runner.forward_pass import ForwardPass, TransformersForward
from baton.engine.runner.graph_recorder import Recorder
from baton.engine.runner.options import DECODER_OF_WEIGHTS, FUSED_WEIGHTS

logger = logging.getLogger(__name__)

CHECK_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.05}
"""Relative error of the logits, by dtype, above which a forward pass does not compute the model. Rounding stays an
order of magnitude below; a lost state, mask or position is an order of magnitude above."""
CHECK_FAILURES = (ValueError, TypeError, RuntimeError, LookupError, AttributeError)
"""Errors of models whose structure is not as expected."""
_CHECK_CHUNKS = (7, 4, 1, 1)
_FAR_POSITION = 32768


def create_forward_pass(
    loaded: LoadedModel,
    cache: PagedKVCache,
    backend: AttentionBackend,
    decoder: str,
    feature_layers: Sequence[int],
    recorder: Recorder | None,
) -> ForwardPass:
    """Creates the forward pass for a model and the options of its runner.

    Args:
        decoder: see :class:`RunnerOptions`.
        feature_layers: hidden states that a draft reads.
        recorder: records CUDA graphs where the backend reads the block table; ``None`` records none.

    Raises:
        UnsupportedModelError: only the fused decoder computes these weights, and it cannot compute the model.
        NotFusableError: ``decoder`` is ``fused``, and it cannot compute the model.
    """
    weights, name = cache.spec.weights, type(loaded.model).__name__
    if loaded.group is not None and (decoder == "fused" or weights in FUSED_WEIGHTS[1:]):
        raise UnsupportedModelError(
            f"The fused decoder computes whole models only, but {name} is divided among {loaded.group.size} ranks. "
            "Set engine.decoder: auto and engine.weights: native, or a tensor-parallel degree of 1."
        )
    if loaded.group is None and "transformers" not in (decoder, DECODER_OF_WEIGHTS.get(weights)):
        try:
            return _create_compared(loaded, cache, feature_layers)
        except NotFusableError as reason:
            if weights != "native":
                raise UnsupportedModelError(
                    f"engine.weights is {weights}, which only the fused decoder supports, and it does not "
                    f"support {name}: {reason}. Set engine.weights: native."
                ) from reason
            if decoder == "fused":
                raise
            logger.info("%s runs on transformers instead of the fused decoder: %s", name, reason)
    modules = TransformersForward(loaded, backend, feature_layers)
    if recorder is None or backend.key_sharing is None:
        return modules
    return GraphedForward(modules, cache, recorder, backend.key_sharing)


def small_cache(loaded: LoadedModel, block_size: int) -> PagedKVCache:
    """A cache with native KV that holds the tokens of :func:`relative_error`."""
    spec = loaded.kv_spec(block_size)
    return PagedKVCache(spec, -(-sum(_CHECK_CHUNKS) // block_size), loaded.model.device)


def relative_error(
    loaded: LoadedModel, cache: PagedKVCache, forward_pass: ForwardPass, first_position: int = 0
) -> float:
    """The error of the last logits of a short input, computed in chunks, relative to the model's own logits.

    Overwrites the first blocks of the cache, which is the one that ``forward_pass`` uses.
    """
    token_ids = check_tokens(sum(_CHECK_CHUNKS), loaded.vocab_size)
    paged = _chunked_logits(cache, forward_pass, token_ids, first_position)
    return relative_distance(paged, own_logits(loaded.model, token_ids, first_position)[-1:])


def _create_compared(loaded: LoadedModel, cache: PagedKVCache, feature_layers: Sequence[int]) -> ForwardPass:
    """Creates the fused decoder. Raises :class:`NotFusableError` also if its logits differ from the model's own."""
    spec = cache.spec
    if loaded.is_fusable:
        return create_fused(loaded, cache, feature_layers, spec.weights)
    compared = cache if spec.encoding is KVEncoding.NATIVE else small_cache(loaded, spec.block_size)
    fused = create_fused(loaded, compared, feature_layers)
    far = min(loaded.max_model_len, _FAR_POSITION) - sum(_CHECK_CHUNKS)
    try:
        # Far from the start too: some models scale queries by their position.
        error = max(relative_error(loaded, compared, fused, first) for first in (0, max(0, far)))
    except CHECK_FAILURES as failure:
        error = float("inf")
        logger.debug("the comparison failed", exc_info=failure)
    if not error <= CHECK_TOLERANCE[loaded.dtype_name]:
        fused.close()
        raise NotFusableError(f"the fused decoder gives different logits (relative error {error:.2g})")
    if compared is cache and spec.weights == "native":
        return fused
    fused.close()
    return create_fused(loaded, cache, feature_layers, spec.weights)


def create_fused(
    loaded: LoadedModel, cache: PagedKVCache, feature_layers: Sequence[int] = (), weights: str = "native"
) -> ForwardPass:
    """Creates the fused decoder over a model's cache, with native, ``int8`` or ``int4`` weights.

    Raises:
        NotFusableError: it does not support the model, cannot be compiled here, or the model is not on the CPU.
    """
    if loaded.model.device.type != "cpu":  # before the import, which takes seconds and fails on some GPU machines
        raise NotFusableError("the fused decoder runs on the CPU only")
    try:
        from baton.engine.cpu.decoder import FusedDecoder  # needs numba, which not every platform has
    except ImportError as error:
        raise NotFusableError(f"the fused decoder cannot be loaded: {error}") from error
    return FusedDecoder(loaded, cache, feature_layers, weights)


@torch.inference_mode()
def _chunked_logits(
    cache: PagedKVCache, forward_pass: ForwardPass, token_ids: list[int], first_position: int
) -> torch.Tensor:
    # Only the first blocks: the cache may have no more than are needed.
    size, dtype = cache.spec.block_size, TORCH_DTYPES[cache.spec.dtype]
    needed = -(-len(token_ids) // size)
    blocks = BlockManager(min(needed, cache.num_blocks), size, prefix_caching=False)
    request = Request("self-check", token_ids, SamplingParams())
    blocks.grow(request, len(token_ids))
    for chunk in _CHECK_CHUNKS:
        batch = ForwardBatch.build([ScheduledSequence(request, chunk)], size, cache.device, dtype)
        batch.positions += first_position
        logits = forward_pass.forward(batch)
        request.num_computed_tokens += chunk
    return logits[-1:]
