"""``generate`` of transformers: ``python -m benchmarks.offline.transformers_engine FOLDER DTYPE``."""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from baton.process.cores import usable_cores
from benchmarks.offline.protocol import Generate, serve


def load(folder: str, dtype: str) -> Generate:
    torch.set_num_threads(usable_cores())
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()

    @torch.inference_mode()
    def generate(prompts: list[list[int]], max_tokens: int) -> list[int]:
        inputs = torch.tensor(prompts)
        answers = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            do_sample=False,
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            pad_token_id=0,
        )
        return [answers.shape[1] - inputs.shape[1]] * len(prompts)

    return generate


if __name__ == "__main__":
    serve(lambda: load(sys.argv[1], sys.argv[2]))
