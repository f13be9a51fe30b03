"""Untrained Medusa heads: each has the target's own lm_head after a residual block that adds nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel


def write_copies_of_the_lm_head(target: PreTrainedModel, folder: Path, num_heads: int) -> None:
    """Writes the heads in vLLM's format."""
    head: Any = target.get_output_embeddings()
    size = head.weight.shape[1]
    tensors: dict[str, torch.Tensor] = {}
    for index in range(num_heads):
        tensors[f"blocks.{index}.layers.0.weight"] = torch.zeros(size, size)
        tensors[f"lm_heads.{index}.weight"] = head.weight.detach().clone()
    save_file(tensors, folder / "model.safetensors")
    config = {"model_type": "medusa", "num_heads": num_heads, "num_hidden_layers": 1, "medusa_fc_bias": False}
    (folder / "config.json").write_text(json.dumps(config))
