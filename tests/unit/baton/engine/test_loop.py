"""The engine's thread sleeps when idle, survives failures, and fails all pending calls when it stops."""

from __future__ import annotations

import gc
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from baton.core.errors import WorkerLostError
from baton.core.request import FinishReason, Request, SamplingParams, TokenOutput
from baton.engine.batch.batch import ForwardBatch
from baton.engine.engine import Engine
from baton.engine.loop import EngineLoop
from baton.engine.runner.model_runner import ModelRunner
from tests.engine_runs import build_engine, greedy, run_tokens
from tests.tiny_models import random_prompts
from tests.waiting import TIMEOUT_S


class Running:
    """A loop over a tiny model, and its outputs in the order in which they came."""

    def __init__(self, engine: Engine, on_outputs: Callable[[Sequence[TokenOutput]], None] | None = None) -> None:
        self.engine = engine
        self.outputs: queue.SimpleQueue[TokenOutput] = queue.SimpleQueue()
        self.num_idle = 0
        self.loop = EngineLoop(engine, on_outputs or self._collect, self._count_idle)

    def _collect(self, outputs: Sequence[TokenOutput]) -> None:
        for output in outputs:
            self.outputs.put(output)

    def _count_idle(self) -> None:
        self.num_idle += 1

    def add(self, name: str, prompt: list[int], params: SamplingParams) -> None:
        self.loop.submit(lambda: self.engine.scheduler.add(Request(name, prompt, params))).result(TIMEOUT_S)

    def finish_of(self, name: str) -> tuple[list[int], TokenOutput]:
        """All tokens of a request and its last output; outputs of others are dropped."""
        tokens: list[int] = []
        while True:
            output = self.outputs.get(timeout=TIMEOUT_S)
            if output.request_id == name:
                tokens.extend(output.token_ids)
                if output.finish_reason is not None:
                    return tokens, output


@pytest.fixture
def running(runner: ModelRunner) -> Iterator[Running]:
    found = Running(build_engine(runner))
    found.loop.start()
    yield found
    found.loop.stop()


def share_of_cpu(running: Running) -> float:
    """What the engine's thread uses of a core during a second."""

    def measure() -> float:
        return time.clock_gettime(time.CLOCK_THREAD_CPUTIME_ID)

    gc.disable()  # a collection of all tests' garbage would count as the thread's, should it fall to that
    try:
        before_s = running.loop.submit(measure).result(TIMEOUT_S)
        time.sleep(1.0)
        return running.loop.submit(measure).result(TIMEOUT_S) - before_s
    finally:
        gc.enable()


def test_an_idle_thread_uses_no_cpu(running: Running) -> None:
    running.add("warm-up", [5, 6, 7], greedy(4))
    running.finish_of("warm-up")
    assert share_of_cpu(running) < 0.03


def test_a_request_waiting_for_blocks_uses_no_cpu_and_wakes_when_they_are_free(running: Running) -> None:
    pool = running.engine.scheduler.blocks.pool
    taken = running.loop.submit(lambda: pool.allocate(pool.num_free)).result(TIMEOUT_S)
    running.add("waiting", [5, 6, 7], greedy(4))
    assert share_of_cpu(running) < 0.03
    assert running.engine.scheduler.num_waiting == 1
    running.loop.submit(lambda: pool.release(taken)).result(TIMEOUT_S)
    assert len(running.finish_of("waiting")[0]) == 4


def test_tokens_match_the_synchronous_engine(running: Running, runner: ModelRunner) -> None:
    prompts = random_prompts((3, 20))
    for index, prompt in enumerate(prompts):
        running.add(f"request-{index}", prompt, greedy(8))
    tokens: dict[str, list[int]] = {"request-0": [], "request-1": []}
    for _ in range(16):
        output = running.outputs.get(timeout=TIMEOUT_S)
        tokens[output.request_id].extend(output.token_ids)
    running.loop.stop()
    assert list(tokens.values()) == run_tokens(build_engine(runner), prompts, 8)


def test_on_idle_is_called_when_work_runs_out(running: Running) -> None:
    running.add("short", [5], greedy(2))
    running.finish_of("short")
    deadline = time.monotonic() + TIMEOUT_S
    while not running.num_idle and time.monotonic() < deadline:
        time.sleep(0.01)
    assert running.num_idle >= 1


def test_cancelling_a_running_request_frees_its_blocks(running: Running) -> None:
    def end(name: str) -> list[str]:
        """By mail, as all who are outside do; returns what is wrong with the blocks then."""
        running.engine.finish(name, FinishReason.ABORT)
        return running.engine.scheduler.blocks.check([])

    running.add("long", [5, 6], greedy(150))
    assert running.outputs.get(timeout=TIMEOUT_S).request_id == "long"
    for name in ("long", "long", "never seen"):
        assert running.loop.submit(partial(end, name)).result(TIMEOUT_S) == []
    running.add("next", [5, 6], greedy(3))
    assert len(running.finish_of("next")[0]) == 3


def test_an_exception_in_the_forward_ends_only_that_step(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = running.engine.runner
    forward = runner.forward
    steps = 0

    def fail_at_the_third_step(batch: ForwardBatch) -> torch.Tensor:
        nonlocal steps
        steps += 1
        if steps == 3:
            raise RuntimeError("the device hiccuped")
        return forward(batch)

    monkeypatch.setattr(runner, "forward", fail_at_the_third_step)
    running.add("unlucky", [5, 6, 7], greedy(10))
    tokens, last = running.finish_of("unlucky")
    assert len(tokens) == 2
    assert last.finish_reason is FinishReason.ERROR
    assert "RuntimeError" in str(last.error)
    running.add("later", [5, 6, 7], greedy(10))
    tokens, last = running.finish_of("later")
    assert len(tokens) == 10
    assert last.finish_reason is FinishReason.LENGTH
    blocks = running.engine.scheduler.blocks
    assert running.loop.submit(lambda: blocks.check([])).result(TIMEOUT_S) == []


def test_an_exception_in_a_call_reaches_only_its_caller(running: Running) -> None:
    def fail() -> None:
        raise KeyError("missing")

    with pytest.raises(KeyError, match="missing"):
        running.loop.submit(fail).result(TIMEOUT_S)
    assert running.loop.submit(lambda: 7).result(TIMEOUT_S) == 7


async def test_call_works_from_asyncio(running: Running) -> None:
    thread = await running.loop.call(threading.current_thread)
    assert thread is not threading.current_thread()


def test_stop_fails_pending_calls(running: Running) -> None:
    entered, leave = threading.Event(), threading.Event()

    def hold() -> int:
        entered.set()
        leave.wait(TIMEOUT_S)
        return 1

    current = running.loop.submit(hold)
    assert entered.wait(TIMEOUT_S)
    pending = [running.loop.submit(lambda: 2) for _ in range(3)]
    stopping = threading.Thread(target=running.loop.stop)
    stopping.start()
    late = running.loop.submit(lambda: 3)
    while not late.done():  # the stop may not have begun yet
        late = running.loop.submit(lambda: 3)
    leave.set()
    stopping.join(TIMEOUT_S)
    assert current.result(TIMEOUT_S) == 1
    for future in (*pending, late):
        with pytest.raises(WorkerLostError, match="engine has ended"):
            future.result(TIMEOUT_S)


def test_stop_before_start_fails_what_was_submitted(runner: ModelRunner) -> None:
    loop = EngineLoop(build_engine(runner), lambda outputs: None)
    future = loop.submit(lambda: 1)
    loop.stop()
    with pytest.raises(WorkerLostError):
        future.result(TIMEOUT_S)


def test_stopping_twice_is_allowed(running: Running) -> None:
    running.loop.stop()
    running.loop.stop()


def test_no_call_is_lost_between_submit_and_stop(runner: ModelRunner) -> None:
    """Callers race with the stop: each gets a result or an error."""

    def send(loop: EngineLoop, futures: list[Any]) -> None:
        futures.extend(loop.submit(lambda: 1) for _ in range(50))

    for _ in range(20):
        running = Running(build_engine(runner))
        running.loop.start()
        futures: list[Any] = []
        senders = [threading.Thread(target=send, args=(running.loop, futures)) for _ in range(3)]
        for sender in senders:
            sender.start()
        running.loop.stop()
        for sender in senders:
            sender.join(TIMEOUT_S)
        assert len(futures) == 150
        for future in futures:
            try:
                assert future.result(TIMEOUT_S) == 1
            except WorkerLostError:
                continue


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dying_thread_fails_all_pending_calls(runner: ModelRunner) -> None:
    def fail(outputs: Sequence[TokenOutput]) -> None:
        raise ValueError("nobody takes the outputs")

    running = Running(build_engine(runner), on_outputs=fail)
    running.loop.start()
    running.add("doomed", [5], greedy(2))
    answers: list[BaseException | None] = []
    while not answers or answers[-1] is None:  # calls work until the thread dies, and are refused from then on
        answers.append(running.loop.submit(lambda: 1).exception(TIMEOUT_S))
    running.loop.stop()
    assert isinstance(answers[-1], WorkerLostError)
