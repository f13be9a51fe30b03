"""Comparisons: steps with fp8 weights, transformers' continuous batching, and one layer compiled by Inductor.

Each comparison is a separate check, so that a failure does not stop the others.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from baton.engine.models.model_loader import prepare_model
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.runner.options import RunnerOptions
from benchmarks.ceilings import fp8_matrix_rate
from benchmarks.device_run.ceilings_part import ceilings_of
from benchmarks.device_run.children import run_here
from benchmarks.device_run.part import SHAPES, Row, Setting
from benchmarks.device_run.random_model import DTYPES, fill_randomly, make_model
from benchmarks.device_run.random_steps import StepTimer, blocks_needed
from benchmarks.device_run.timing import WatchedRecorder, graphed, median_ms
from benchmarks.engine_steps import Case, Work
from benchmarks.offline.baton_engine import generate_by
from benchmarks.offline.protocol import Generate
from benchmarks.offline.transformers_continuous_engine import generate_by as generate_by_transformers

_BLOCK_SIZE = 16
_BUDGET_S = 0.3


def run(setting: Setting) -> Iterator[Row]:
    """Yields the times of each comparison; an impossible comparison gives a row that says why."""
    return run_here(__name__, tuple(_COMPARISONS), setting)


def check(name: str, setting: Setting) -> Iterator[Row]:
    """Frees the device's memory and yields the rows of one comparison."""
    gc.collect()
    if setting.device.type == "cuda":
        torch.cuda.empty_cache()
    yield from _COMPARISONS[name](setting)


def _requests(name: str, make: Callable[[Setting, int, int], Generate], setting: Setting) -> Iterator[Row]:
    """Measures the same requests on each engine, including their prompts; the second of two rounds counts."""
    batch, prompt_tokens, output_tokens = (2, 8, 4) if setting.is_tiny else (64, 128, 64)
    rng = random.Random(setting.seed)
    generate = make(setting, batch, prompt_tokens + output_tokens + 1)
    vocab_size = SHAPES[setting.shape]["vocab_size"]
    for _ in range(2):
        prompts = [[rng.randrange(vocab_size) for _ in range(prompt_tokens)] for _ in range(batch)]
        started_s = time.perf_counter()
        counts = generate(prompts, output_tokens)
        took_s = time.perf_counter() - started_s
    yield {
        "name": f"{name}: {batch} x ({prompt_tokens} -> {output_tokens})",
        "ok": counts == [output_tokens] * batch,
        "s": took_s,
        "tokens_per_s": batch * output_tokens / took_s,
    }


def _baton(setting: Setting, batch: int, max_model_len: int) -> Generate:
    loaded = prepare_model(make_model(setting.shape, setting.device), DTYPES[setting.shape])
    runner = ModelRunner(
        loaded, 1 + batch * -(-max_model_len // _BLOCK_SIZE), _BLOCK_SIZE, RunnerOptions(decoder="transformers")
    )
    runner.capture_graphs(batch, 0, max_model_len)
    return generate_by(runner, max_model_len, batch)


def _transformers(setting: Setting, batch: int, max_model_len: int) -> Generate:
    return generate_by_transformers(make_model(setting.shape, setting.device), max_model_len, batch)


def _fp8(setting: Setting) -> Iterator[Row]:
    """Measures steps of a model with fp8 linear layers, which are computed slowly on the CPU."""
    rate = fp8_matrix_rate(setting.device)
    if setting.device.type == "cuda" and rate is None:
        yield {"name": "fp8 steps", "not_run": "the card has no fp8"}
        return
    cases = [Case(1, 1, 1024), Case(64, 1, 1024), Case(1, 8192, 0)]
    if setting.is_tiny:
        cases = [Case(1, 1, 16), Case(2, 1, 16), Case(1, 16, 0)]
    ceilings = ceilings_of(setting)
    if rate is not None:
        ceilings = replace(ceilings, flops_per_second=rate)
    model = make_model(setting.shape, setting.device).to(torch.bfloat16)
    try:
        loaded = prepare_model(model, "bfloat16", "fp8")
    except NotImplementedError:
        if setting.device.type == "cuda":
            raise
        yield {"name": "fp8 steps", "not_run": f"torch {torch.__version__} has no fp8 products on the CPU"}
        return
    recorder = WatchedRecorder() if setting.device.type == "cuda" else None
    num_blocks = max(blocks_needed(case, _BLOCK_SIZE) for case in cases)
    runner = ModelRunner(
        loaded, num_blocks, _BLOCK_SIZE, RunnerOptions(decoder="transformers", weights="fp8"), recorder=recorder
    )
    fill_randomly(runner.cache)
    runner.capture_graphs(cases[1].batch, 0, cases[0].context + _BLOCK_SIZE)
    timer, work = StepTimer(runner, recorder, _BUDGET_S), Work(loaded, runner.spec.bytes_per_token)
    for case in cases:
        times = timer.times(case)
        least_ms = work.least_ms(case, ceilings)
        yield {
            "name": f"fp8: {case.name}",
            "full_ms": times.full,
            "replay_ms": times.replay,
            "eager_ms": times.eager,
            "limit_ms": least_ms,
            "of_limit": least_ms / times.full,
        }


def _compiled_layer(setting: Setting) -> Iterator[Row]:
    """Measures a decoder layer with torch's own attention, eager and compiled; on the CPU it is only traced."""
    is_cuda = setting.device.type == "cuda"
    model = make_model(setting.shape, setting.device)
    model.set_attn_implementation("sdpa")
    decoder: Any = model.model
    layer = decoder.layers[0]
    dtype = next(layer.parameters()).dtype
    compiled = torch.compile(layer, dynamic=False, backend="inductor" if is_cuda else "eager")
    hidden_size = layer.input_layernorm.weight.shape[0]
    for num_tokens in (8,) if setting.is_tiny else (64, 2048):
        states = torch.randn(1, num_tokens, hidden_size, device=setting.device, dtype=dtype)
        positions = torch.arange(num_tokens, device=setting.device)[None]
        rotation = decoder.rotary_emb(states, positions)
        for name, module in (("as it is", layer), ("compiled", compiled)):

            @torch.no_grad()
            def work(module: Any = module, states: Any = states, rotation: Any = rotation) -> None:
                module(states, attention_mask=None, position_embeddings=rotation)

            started_s = time.perf_counter()
            work()
            first_s = time.perf_counter() - started_s
            ms = median_ms(graphed(work, setting.device), _BUDGET_S)
            yield {"name": f"a layer over {num_tokens} tokens, {name}", "ms": ms, "first_s": first_s}


_COMPARISONS: Mapping[str, Callable[[Setting], Iterator[Row]]] = {
    "fp8": _fp8,
    "baton": partial(_requests, "baton", _baton),
    "transformers": partial(_requests, "transformers", _transformers),
    "a compiled layer": _compiled_layer,
}
