"""Checks the handling of device errors. Each check may leave its process without a usable device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from baton.core.errors import WorkerLostError
from baton.core.request import FinishReason, Request
from baton.engine.loop import EngineLoop
from baton.engine.models.model_loader import LoadedModel, prepare_model
from benchmarks.device_run.architecture_checks import compared, make_runner
from benchmarks.device_run.part import Row
from tests.engine_runs import build_engine, greedy, run, run_tokens
from tests.tiny_models import random_prompts, tiny_model

_PROMPTS = random_prompts((9, 4))
_NUM_TOKENS = 6
_NO_TOKEN = 10**6
"""A token outside any vocabulary, for which the embedding kernel's assertion fails."""
_LIMIT_S = 30.0
_SLACK_BYTES = 8 * 2**20


def _load(device: torch.device) -> LoadedModel:
    model: Any = tiny_model("llama")
    return prepare_model(model.to(device), "float32")


def check_failed_recording(device: torch.device) -> Iterator[Row]:
    """After a model whose capture fails because it waits for the device, tokens stay right and others are captured."""
    loaded = _load(device)
    expected = run_tokens(build_engine(make_runner(loaded, "off")), _PROMPTS, _NUM_TOKENS)

    def wait(*_: object) -> None:
        if torch.cuda.is_current_stream_capturing():
            torch.ones(1, device=device).item()

    hook = loaded.model.get_input_embeddings().register_forward_pre_hook(wait)
    for name in ("a failed recording", "a recording after a failed one"):
        runner = make_runner(loaded, "auto")
        runner.capture_graphs(len(_PROMPTS), 0, loaded.max_model_len)
        hook.remove()
        found = run_tokens(build_engine(runner), _PROMPTS, _NUM_TOKENS)
        row = compared(name, found, expected, graphs=runner.num_graphs)
        if bool(runner.num_graphs) is (name == "a failed recording"):
            row |= {"ok": False, "error": f"{runner.num_graphs} graphs were recorded; failure: {runner.graph_failure}"}
        if torch.cuda.current_stream(device) != torch.cuda.default_stream(device):
            row |= {"ok": False, "error": "the recording left its own stream as the current one"}
        yield row
        runner.close()


def check_lack_of_memory(device: torch.device) -> Iterator[Row]:
    """The requests of a step that runs out of memory end with an error, and later requests get their tokens."""
    runner = make_runner(_load(device), "off")
    expected = run_tokens(build_engine(runner), _PROMPTS, _NUM_TOKENS)
    engine = build_engine(runner)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(device) + _SLACK_BYTES) / total, device)
    try:
        hoard = _take_all_memory(device)
        outcomes = run(engine, _PROMPTS, greedy(_NUM_TOKENS))
        del hoard
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    failed = sum(outcome.finish_reason is FinishReason.ERROR for outcome in outcomes)
    row = compared("a lack of memory", run_tokens(engine, _PROMPTS, _NUM_TOKENS), expected, failed=failed)
    if failed != len(_PROMPTS):
        row |= {"ok": False, "error": f"{failed} of {len(_PROMPTS)} requests failed: nothing was checked"}
    yield row


def _take_all_memory(device: torch.device) -> list[torch.Tensor]:
    """Allocates until not even the allocator's smallest piece is left."""
    hoard: list[torch.Tensor] = []
    for num_bytes in (2**20, 512):
        try:
            while True:
                hoard.append(torch.empty(num_bytes, dtype=torch.uint8, device=device))
        except torch.OutOfMemoryError:
            continue
    return hoard


def check_lost_device(device: torch.device) -> Iterator[Row]:
    """A device-side assertion ends the engine, and every open stream gets an error."""
    engine = build_engine(make_runner(_load(device), "off"))
    closed = threading.Event()
    outputs: list[Any] = []
    loop = EngineLoop(engine, outputs.extend, on_closed=closed.set)
    request = Request("lost", [5, _NO_TOKEN, 7], greedy(_NUM_TOKENS))
    loop.start()
    loop.submit(lambda: engine.scheduler.add(request))
    row: dict[str, object] = {"name": "a lost device", "ok": closed.wait(_LIMIT_S)}
    if not row["ok"]:
        loop.stop()
        yield row | {"error": f"the engine continued; it gave {[output.finish_reason for output in outputs]}"}
        return
    answer = loop.submit(lambda: None).exception(_LIMIT_S)
    if outputs or not isinstance(answer, WorkerLostError):
        row |= {"ok": False, "error": f"the engine gave {len(outputs)} outputs and answered {answer!r}"}
    yield row


ERRORS: Mapping[str, Callable[[torch.device], Iterator[Row]]] = {
    "a failed recording": check_failed_recording,
    "a lack of memory": check_lack_of_memory,
    "a lost device": check_lost_device,
}
