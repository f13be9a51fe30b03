"""A model without weights: the shapes of its tensors and of its cache, from its config alone."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from baton.core.errors import ConfigError, UnsupportedModelError
from baton.core.kv_spec import LayerSpec
from baton.engine.attention.latent import project_latents, share_latents

_NAME = "baton_shapes"
_NUM_TOKENS = 4
_FAULTS = (ValueError, TypeError, RuntimeError, LookupError, AttributeError, ArithmeticError, AssertionError)
"""What modelling code raises for settings that do not belong together."""


def empty_model(config: Any, dtype: torch.dtype = torch.bfloat16, *, is_plain: bool = True) -> PreTrainedModel:
    """The model of a config on the ``meta`` device. It gets a copy of the config, which it may change.

    Args:
        is_plain: its weights are plain numbers, so that its cache may hold latents.

    Raises:
        ConfigError: no model can be built with these settings.
    """
    model = _build(copy.deepcopy(config), dtype)
    model.tie_weights()
    model.eval()
    if is_plain:
        share_latents(model)
    return model


def _build(config: Any, dtype: torch.dtype) -> PreTrainedModel:
    try:
        with torch.device("meta"), no_init_weights():
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except _FAULTS as error:
        raise ConfigError(
            f"model: no model can be built from the config.json ({type(error).__name__}: {error}). "
            "Take the one that belongs to the checkpoint."
        ) from error
    return model


def attention_shapes(model: PreTrainedModel) -> tuple[LayerSpec, ...]:
    """Shapes of the keys and values of an empty model in bfloat16, layer by layer.

    Raises:
        UnsupportedModelError: the model computes something that depends on the values of its tensors, or attends in
            both directions.
    """
    found: list[LayerSpec] = []

    def attend(
        module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, None]:
        if getattr(module, "is_causal", True) is False:
            raise UnsupportedModelError(
                f"{type(model).__name__} attends in both directions; baton serves causal language models."
            )
        found.append(LayerSpec(int(key.shape[1]), int(key.shape[3]), int(value.shape[3])))
        output = value.repeat_interleave(query.shape[1] // key.shape[1], dim=1).transpose(1, 2)
        return project_latents(module, output).contiguous(), None

    ALL_ATTENTION_FUNCTIONS.register(_NAME, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_NAME, lambda *_, **__: None)
    token_ids = torch.arange(_NUM_TOKENS, device="meta")[None]
    try:
        model.set_attn_implementation(_NAME)
        with torch.inference_mode():  # with a cache, since models without one look into the positions
            cache = DynamicCache(config=model.config)
            model(input_ids=token_ids, position_ids=token_ids, past_key_values=cache, use_cache=True)
    except _FAULTS as error:
        raise UnsupportedModelError(
            f"the shapes of {type(model).__name__}'s cache cannot be found without its weights "
            f"({type(error).__name__}: {error})"
        ) from error
    finally:
        ALL_ATTENTION_FUNCTIONS._global_mapping.pop(_NAME, None)
        ALL_MASK_ATTENTION_FUNCTIONS._global_mapping.pop(_NAME, None)
    return tuple(found)
