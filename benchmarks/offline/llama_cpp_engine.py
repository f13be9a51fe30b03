"""llama.cpp: ``python -m benchmarks.offline.llama_cpp_engine GGUF MOST_TOKENS``, under a Python with llama-cpp-python.

One sequence at a time, in the precision of the file, with a thread for each core.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

from benchmarks.offline.protocol import Generate, serve


def load(gguf_file: str, max_model_len: int) -> Generate:
    threads = len(os.sched_getaffinity(0))
    llama: Any = import_module("llama_cpp").Llama(
        gguf_file, n_ctx=max_model_len, n_batch=max_model_len, n_threads=threads, n_threads_batch=threads, verbose=False
    )

    def answer(prompt: list[int], max_tokens: int) -> int:
        llama.reset()
        llama.eval(prompt)
        for _ in range(max_tokens - 1):
            llama.eval([llama.sample(temp=0.0)])
        llama.sample(temp=0.0)
        return max_tokens

    def generate(prompts: list[list[int]], max_tokens: int) -> list[int]:
        return [answer(prompt, max_tokens) for prompt in prompts]

    return generate


if __name__ == "__main__":
    serve(lambda: load(sys.argv[1], int(sys.argv[2])))
