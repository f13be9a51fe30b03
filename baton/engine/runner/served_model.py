"""Loads a model for serving; ``dtype: auto`` takes the best dtype for the decoder that will compute it."""

from __future__ import annotations

import gc
import logging
from dataclasses import replace

import torch

from baton.core.errors import NotFusableError
from baton.engine.models.float32_products import has_bfloat16
from baton.engine.models.model_loader import LoadedModel, load_config, load_model, stored_dtype
from baton.engine.models.model_source import ModelSource
from baton.engine.parallel.group import RankGroup
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.runner.options import DECODER_OF_WEIGHTS, RunnerOptions

logger = logging.getLogger(__name__)

_TRIAL_BLOCK_SIZE = 16


def load_served_model(
    source: ModelSource,
    dtype: str,
    device: torch.device,
    weights: str = "native",
    decoder: str = "auto",
    group: RankGroup | None = None,
) -> LoadedModel:
    """Like ``load_model``, but keeps a checkpoint's bfloat16 where the fused decoder takes it.

    Without bfloat16 instructions, the fused decoder widens it in registers: its time depends on the bytes, which are
    half of float32's. A model's own modules are faster in float32 there.

    Args:
        decoder: the configured decoder, see :class:`baton.engine.runner.model_runner.ModelRunner`.
        group: see ``load_model``; the fused decoder does not compute parts of a model.
    """
    if (
        group is None
        and (dtype, device.type) == ("auto", "cpu")
        and not has_bfloat16(device)
        and "transformers" not in (decoder, DECODER_OF_WEIGHTS.get(weights))
        and stored_dtype(load_config(source)) == "bfloat16"
    ):
        loaded = load_model(source, "bfloat16", device, weights)
        reason = why_not_fused(loaded)
        if reason is None:
            return replace(loaded, is_fusable=True)
        logger.info("dtype is float32, because the fused decoder does not support %s: %s", source.name, reason)
        del loaded
        gc.collect()  # float32 product layers refer to themselves; both models might not fit into memory
    return load_model(source, dtype, device, weights, group)


def why_not_fused(loaded: LoadedModel) -> str | None:
    """Why the fused decoder does not compute a model here; ``None`` if it does and gives the model's own logits."""
    try:
        ModelRunner(loaded, 1, _TRIAL_BLOCK_SIZE, RunnerOptions(decoder="fused")).close()
    except NotFusableError as reason:
        return reason.message
    return None
