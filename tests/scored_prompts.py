"""Log probabilities of prompts by transformers, to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel


def load_reference(folder: Path) -> PreTrainedModel:
    """The model in float32."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


@torch.inference_mode()
def log_softmax_of(model: PreTrainedModel, token_ids: Sequence[int]) -> torch.Tensor:
    """Log probabilities of all tokens at each place after the first, ``[num_tokens - 1, vocab_size]``."""
    logits = model(torch.tensor([list(token_ids)])).logits[0, :-1]
    return torch.log_softmax(logits.float(), dim=-1)


def own_logprobs(expected: torch.Tensor, token_ids: Sequence[int]) -> list[float]:
    """Those of the prompt's own tokens after the first."""
    own: list[float] = expected.gather(1, torch.tensor(list(token_ids[1:]))[:, None])[:, 0].tolist()
    return own
