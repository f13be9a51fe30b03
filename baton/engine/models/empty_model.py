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

from baton.core.errors import UnsupportedModelError
from baton.core.kv_spec import LayerSpec
from baton.engine.attention.latent import project_latents, share_latents

_NAME = "baton_shapes"
_NUM_TOKENS = 4


def empty_model(config: Any, dtype: torch.dtype = torch.bfloat16, *, is_plain: bool = True) -> PreTrainedModel:
    """The model of a config on the ``meta`` device. It gets a copy of the config, which it may change.

    Args:
        is_plain: its weights are plain numbers, so that its cache may hold latents.
    """
    with torch.device("meta"), no_init_weights():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype)
    model.tie_weights()
    model.eval()
    if is_plain:
        share_latents(model)
    return model


def attention_shapes(model: PreTrainedModel) -> tuple[LayerSpec, ...]:
    """Shapes of the keys and values of an empty model in bfloat16, layer by layer.

    Raises:
        UnsupportedModelError: the model computes something that depends on the values of its tensors.
    """
    found: list[LayerSpec] = []

    def attend(
        module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, None]:
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
    except (ValueError, TypeError, RuntimeError, LookupError, AttributeError) as error:
        raise UnsupportedModelError(
            f"the shapes of {type(model).__name__}'s cache cannot be found without its weights "
            f"({type(error).__name__}: {error})"
        ) from error
    finally:
        ALL_ATTENTION_FUNCTIONS._global_mapping.pop(_NAME, None)
        ALL_MASK_ATTENTION_FUNCTIONS._global_mapping.pop(_NAME, None)
    return tuple(found)
