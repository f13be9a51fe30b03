"""Loads a model to be served, where ``dtype: auto`` leaves its dtype open: in what is best for what will compute it."""

from __future__ import annotations

import torch

from engine.forward_pass import NotFusableError
from engine.model_loader import LoadedModel, has_bfloat16, load_config, load_model, stored_dtype
from engine.model_source import ModelSource


def load_served_model(
    source: ModelSource, dtype: str, device: torch.device, weights: str = "native", decoder: str = "auto"
) -> LoadedModel:
    """:func:`engine.model_loader.load_model`, but a checkpoint's bfloat16 stays what it is where the program takes it.

    Without instructions for bfloat16, the fused decoder widens it in registers: what takes its time are the bytes, half
    of float32's.

    Args:
        decoder: what may compute the model, see :class:`engine.model_runner.ModelRunner`.
    """
    if (
        (dtype, device.type) == ("auto", "cpu")
        and not has_bfloat16(device)
        and decoder != "transformers"
        and weights != "fp8"
        and stored_dtype(load_config(source)) == "bfloat16"
    ):
        loaded = load_model(source, "bfloat16", device, weights)
        if can_fuse(loaded):
            return loaded
    return load_model(source, dtype, device, weights)


def can_fuse(loaded: LoadedModel) -> bool:
    """Whether the fused decoder knows the structure of a model; what it computes is compared later."""
    try:
        import engine.fused.decoder  # noqa: F401 - needs numba, which not every platform has
        from engine.fused.structure import read_decoder
    except ImportError:
        return False
    try:
        read_decoder(loaded)
    except NotFusableError:
        return False
    return True
