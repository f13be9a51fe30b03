"""Checks the capture of CUDA graphs for all tiny architectures, and finds where their forward waits for the device."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from baton.core.drafts import ScheduledSequence
from baton.core.request import Request, SamplingParams
from baton.engine.device.uploads import TORCH_DTYPES
from baton.engine.models.model_loader import prepare_model
from baton.engine.runner.cuda_graphs import make_buckets
from baton.engine.runner.model_runner import ModelRunner
from benchmarks.device_run.architecture_checks import compared, make_runner
from benchmarks.device_run.part import Row
from tests.engine_runs import build_engine, run_tokens
from tests.tiny_models import random_prompts, tiny_model

_LENGTHS = (9, 4)
_NUM_TOKENS = 6
_SYNCHRONIZES = re.compile("synchroni[sz]ing CUDA operation")


def check_capture(name: str, device: torch.device) -> Iterator[Row]:
    """Yields one row, which is right when the tokens after the capture, which may fail, equal those before it.

    Models with experts use bfloat16: in float32, torch waits for the device to group their products. There is a graph
    for each batch size, so both modes compute the same products with the same rounding.
    """
    prompts = random_prompts(_LENGTHS)
    model: Any = tiny_model(name)
    dtype = "bfloat16" if "grouped_mm" in model.get_experts_implementation().values() else "float32"
    loaded = prepare_model(model.to(device, TORCH_DTYPES[dtype]), dtype)
    plain = make_runner(loaded, "off")
    expected = run_tokens(build_engine(plain), prompts, _NUM_TOKENS)
    waits = places_that_wait(plain)
    plain.close()
    runner = make_runner(loaded, "auto")
    runner.capture_graphs(len(prompts), 0, loaded.max_model_len)
    stream_is_restored = torch.cuda.current_stream(device) == torch.cuda.default_stream(device)
    found = run_tokens(build_engine(runner), prompts, _NUM_TOKENS)
    figures = {"graphs": runner.num_graphs, "of": len(make_buckets(len(prompts), 0))}
    row = {**compared(f"graphs of {name}, {dtype}", found, expected, **figures), "waits_at": ", ".join(waits)}
    if runner.graph_failure is not None:
        row["graph_failure"] = str(runner.graph_failure)
    if not stream_is_restored:
        row |= {"ok": False, "error": "the recording left its own stream as the current one"}
    yield row


def places_that_wait(runner: ModelRunner) -> list[str]:
    """The places, as ``file:line``, where a decode step's forward makes the host wait for the device."""
    request = Request("wait", [5] * 9, SamplingParams(), num_computed_tokens=8, block_ids=[0])
    batch = runner.build_batch([ScheduledSequence(request, 1)])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            runner.forward(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found = [each for each in caught if _SYNCHRONIZES.search(str(each.message))]
    return sorted({f"{Path(each.filename).name}:{each.lineno}" for each in found})
