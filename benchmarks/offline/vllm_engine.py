"""vLLM, under its own Python: ``python -m benchmarks.offline.vllm_engine FOLDER DTYPE MOST_TOKENS MOST_SEQUENCES``."""

from __future__ import annotations

import os
import sys
from typing import Any

from benchmarks.offline.protocol import Generate, serve


def load(folder: str, dtype: str, max_model_len: int, max_sequences: int) -> Generate:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # a second process would spin during the other engine's turn
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    from importlib import import_module

    vllm: Any = import_module("vllm")
    llm = vllm.LLM(
        model=folder,
        dtype=dtype,
        max_model_len=max_model_len,
        max_num_seqs=max_sequences,
        max_num_batched_tokens=max(2048, max_model_len),
        enable_prefix_caching=False,
        disable_log_stats=True,
    )

    def generate(prompts: list[list[int]], max_tokens: int) -> list[int]:
        params = vllm.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        answers = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [len(answer.outputs[0].token_ids) for answer in answers]

    return generate


if __name__ == "__main__":
    serve(lambda: load(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
