"""Continuous batching of transformers, its paged cache and scheduler instead of ``generate``.

``python -m benchmarks.offline.transformers_continuous_engine FOLDER DTYPE MOST_TOKENS MOST_SEQUENCES``
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from baton.process.cores import usable_cores
from benchmarks.offline.protocol import Generate, serve

_PAGE_TOKENS = 16
_NO_EOS = -1


def load(folder: str, dtype: str, max_model_len: int, max_sequences: int) -> Generate:
    """Loads the engine.

    Args:
        folder: the model's folder.
        dtype: ``bfloat16`` or ``float32``.
        max_model_len: maximum length of a sequence.
        max_sequences: maximum number of concurrent sequences.
    """
    torch.set_num_threads(usable_cores())
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    return generate_by(model, max_model_len, max_sequences)


def generate_by(model: Any, max_model_len: int, max_sequences: int) -> Generate:
    """The same for a loaded model."""
    config = GenerationConfig(do_sample=False, eos_token_id=_NO_EOS, pad_token_id=0)
    # transformers 5.17 names this block_size.
    known = inspect.signature(ContinuousBatchingConfig).parameters
    page: Any = {("page_size" if "page_size" in known else "block_size"): _PAGE_TOKENS}
    batching = ContinuousBatchingConfig(
        **page,
        num_blocks=1 + max_sequences * -(-max_model_len // _PAGE_TOKENS),
        # All prompts in one step, as in baton; on a CPU only one, since a step's masks take this times the cache.
        max_batch_tokens=max_model_len * (max_sequences if model.device.type == "cuda" else 1),
        max_requests_per_batch=max_sequences,
        allow_block_sharing=False,
        use_cuda_graph=model.device.type == "cuda",
    )

    def generate(prompts: list[list[int]], max_tokens: int) -> list[int]:
        # The cache is kept; the thread ends with each call, so that it does not disturb another engine's turn.
        answers = model.generate_batch(
            prompts, config, batching, persistent_manager=True, warmup=False, max_new_tokens=max_tokens
        )
        if failed := [answer.error for answer in answers.values() if answer.error is not None]:
            raise RuntimeError(f"transformers failed: {failed[0]}")
        return [len(answer.generated_tokens) for answer in answers.values()]

    return generate


if __name__ == "__main__":
    serve(lambda: load(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
