"""Niceness of the engine's thread and of the fused decoder's helper threads."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from baton.core.drafts import ScheduledSequence
from baton.core.request import Request, SamplingParams
from baton.engine.cpu.tiles import has_tiles
from baton.engine.loop import EngineLoop
from baton.engine.models.model_loader import prepare_model
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.runner.options import RunnerOptions
from tests.engine_runs import build_engine, build_runner
from tests.tiny_models import tiny_model
from tests.waiting import TIMEOUT_S

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere niceness is a process's")


def niceness_of(thread: int = 0) -> int:
    """The niceness of the calling thread, or of the thread with this native id."""
    return os.getpriority(os.PRIO_PROCESS, thread)


@pytest.mark.parametrize("niceness", [0, 3])
def test_only_the_thread_of_the_engine_lowers_its_priority(niceness: int) -> None:
    before = niceness_of()
    loop = EngineLoop(build_engine(build_runner(tiny_model("llama"))), lambda outputs: None, niceness=niceness)
    loop.start()
    try:
        assert loop.submit(niceness_of).result(TIMEOUT_S) == min(19, before + niceness)
    finally:
        loop.stop()
    assert niceness_of() == before


def test_helpers_have_the_niceness_of_their_leader() -> None:
    loaded, before, others = prepare_model(tiny_model("llama"), "float32"), torch.get_num_threads(), helpers()
    runner = ModelRunner(loaded, 4, 16, RunnerOptions(decoder="fused"))
    request = Request("a", [5, 6, 7], SamplingParams())
    request.block_ids = [0]
    batch = runner.build_batch([ScheduledSequence(request, 3)])

    def logits_and_helpers(niceness: int) -> tuple[torch.Tensor, list[int]]:
        """Computed by a thread that is so much nicer than this one."""
        torch.set_num_threads(3)
        os.nice(niceness)
        logits = runner.forward(batch)
        return logits, [niceness_of(helper) for helper in helpers() - others]

    try:
        results = []
        for niceness in (0, 4, 0):
            with ThreadPoolExecutor(1) as pool:
                results.append(pool.submit(logits_and_helpers, niceness).result(TIMEOUT_S))
    finally:
        torch.set_num_threads(before)
        runner.close()
    assert [helpers for _, helpers in results] == [[niceness_of() + n] * 2 for n in (0, 4, 0)]
    assert all(torch.equal(logits, results[0][0]) for logits, _ in results)


def helpers() -> set[int]:
    """Native ids of threads of fused decoders."""
    live = [thread for thread in threading.enumerate() if thread.name.startswith("fused-")]
    return {thread.native_id for thread in live if thread.native_id is not None}


@pytest.mark.parametrize(
    ("dtype", "decoder"),
    [("bfloat16", "fused"), ("float32", "fused"), ("float32", "transformers")],
)
def test_a_runner_reports_whether_it_uses_tiles(dtype: str, decoder: str) -> None:
    loaded = prepare_model(tiny_model("llama").to(getattr(torch, dtype)), dtype)
    runner = ModelRunner(loaded, 4, 16, RunnerOptions(decoder=decoder))
    assert runner.has_tiles == (decoder == "fused" and dtype == "bfloat16" and has_tiles())
    runner.close()
