"""Errors of a device, injected at every place of a step: which requests fail, and that no other loses a token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import baton.engine.engine
import baton.engine.sampling.verification
from baton.core.chunk_budget import SchedulerLimits
from baton.core.errors import WorkerLostError
from baton.core.request import FinishReason, Request, SamplingParams
from baton.engine.async_engine import AsyncEngine, generate_all
from baton.engine.device.device_errors import DeviceLostError, is_device_lost, is_out_of_memory
from baton.engine.engine import Engine
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.sampling.sampler import QueuedSample
from baton.engine.scheduling.scheduler import Scheduler
from baton.engine.step.overlap import always, never
from decode_worker.speculation.verification import SampleAndMatch
from tests.engine_runs import Outcome, build_engine, greedy, run
from tests.tiny_models import random_prompts
from tests.toy_proposers import Oracle

PROMPTS = random_prompts((4, 9, 13, 6, 21, 2))
SEATS = 2
MAX_TOKENS = 6
PARAMS = [greedy(MAX_TOKENS) if index % 2 else SamplingParams(max_tokens=MAX_TOKENS, seed=index) for index in range(6)]


def cuda_error(text: str, code: int | None) -> torch.AcceleratorError:
    error = torch.AcceleratorError(f"CUDA error: {text}")
    if code is not None:
        error.error_code = code
    return error


OUT_OF_MEMORY: dict[str, Callable[[], Exception]] = {
    "torch": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "driver": lambda: cuda_error("out of memory", 2),
    "cublas": lambda: RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "cublas-handle": lambda: RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(h)`"),
    "cudnn": lambda: RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    "triton": lambda: RuntimeError("Triton Error [CUDA]: out of memory"),
    "driver-api": lambda: RuntimeError("CUDA driver error: out of memory"),
}
LOST: dict[str, Callable[[], Exception]] = {
    "illegal-address": lambda: cuda_error("an illegal memory access was encountered", 700),
    "assert": lambda: cuda_error("device-side assert triggered", 710),
    "memory-fault": lambda: cuda_error("uncorrectable ECC error encountered", 214),
    "no-code": lambda: cuda_error("unknown error", None),
    "cublas": lambda: RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(...)`"),
    "nccl": lambda: torch.distributed.DistBackendError("NCCL communicator was aborted on rank 0."),
    "triton": lambda: RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
}
HARMLESS: dict[str, Callable[[], Exception]] = {
    "launch": lambda: cuda_error("too many resources requested for launch", 701),
    "capture": lambda: cuda_error("operation not permitted when stream is capturing", 900),
    "not-supported": lambda: cuda_error("operation not supported", 801),
    "handle": lambda: cuda_error("invalid resource handle", 400),
    "no-kernel": lambda: cuda_error("no kernel image is available for execution on the device", 209),
    "bug": lambda: ValueError("a bug"),
}
PLACES = ("build_batch", "forward", "sample", "read", "keep_accepted", "propose", "computed")
AFTER_BOOKING = ("read",)
"""Where an overlapped step fails when its requests have moved on already."""


@pytest.fixture(scope="module")
def expected(runner: ModelRunner) -> list[list[int]]:
    return [outcome.token_ids for outcome in run(build_engine(runner), PROMPTS, PARAMS)]


@dataclass
class Fault:
    """Raises errors at one place, from its ``first``-th visit on, so many times."""

    make: Callable[[], Exception]
    first: int
    times: int
    num_visits: int = 0
    num_raised: int = 0
    num_freed: int = 0

    def visit(self) -> None:
        self.num_visits += 1
        if self.num_visits >= self.first and self.num_raised < self.times:
            self.num_raised += 1
            raise self.make()

    def before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            self.visit()
            return function(*args, **kwargs)

        return called


@dataclass
class FaultyRun:
    """An engine of two seats whose steps meet a fault."""

    runner: ModelRunner
    truth: Sequence[Sequence[int]]
    patch: pytest.MonkeyPatch

    def engine(self, fault: Fault, place: str, *, ahead: bool) -> Engine:
        limits = SchedulerLimits(64, SEATS, self.runner.loaded.max_model_len)
        scheduler = Scheduler(limits, build_engine(self.runner).scheduler.blocks)
        oracle = Oracle({f"request-{index}": tokens for index, tokens in enumerate(self.truth)}, "half right", "tree")
        drafts: dict[str, Any] = {} if ahead else {"proposer": oracle, "verifier": SampleAndMatch()}
        engine_ = Engine(self.runner, scheduler, runs_ahead=always if ahead else never, **drafts)
        self.patch.setattr(baton.engine.engine, "free_cached_memory", lambda device: self._count_freed(fault))
        if place in ("build_batch", "forward", "keep_accepted"):
            self.patch.setattr(self.runner, place, fault.before(getattr(self.runner, place)))
        elif place == "sample" and not ahead:
            self.patch.setattr(SampleAndMatch, "verify", fault.before(SampleAndMatch.verify))
        elif place == "sample":
            self.patch.setattr(
                baton.engine.sampling.verification,
                "queue_sample",
                fault.before(baton.engine.sampling.verification.queue_sample),
            )
        elif place == "read":
            self.patch.setattr(QueuedSample, "read", fault.before(QueuedSample.read))
        else:
            self.patch.setattr(Oracle, place, fault.before(getattr(Oracle, place)))
        return engine_

    @staticmethod
    def _count_freed(fault: Fault) -> None:
        fault.num_freed += 1


@pytest.fixture
def faulty(runner: ModelRunner, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> FaultyRun:
    return FaultyRun(runner, expected, monkeypatch)


WAITING = [(place, False, first) for place in PLACES for first in (1, 2, 5)]
OVERLAPPED = [(place, True, first) for place in ("build_batch", "forward", "sample", "read") for first in (1, 2, 5)]
"""Nothing is drafted there."""
CASES = pytest.mark.parametrize(("place", "ahead", "first"), [*WAITING, *OVERLAPPED])


def each_kind(kinds: Mapping[str, Callable[[], Exception]]) -> pytest.MarkDecorator:
    """One kind of error at every place, and the others at two."""
    first, *others = kinds
    cases = [(*case, kinds[first]) for case in (*WAITING, *OVERLAPPED)]
    cases += [(*case, kinds[kind]) for kind in others for case in (("forward", False, 2), ("read", True, 2))]
    return pytest.mark.parametrize(("place", "ahead", "first", "make"), cases)


def check_others(outcomes: Sequence[Outcome], expected: Sequence[Sequence[int]]) -> int:
    """Every request has all its tokens, or has failed behind some of them. Returns how many failed."""
    num_failed = 0
    for outcome, tokens in zip(outcomes, expected, strict=True):
        if outcome.finish_reason is FinishReason.ERROR:
            num_failed += 1
            assert outcome.token_ids == tokens[: len(outcome.token_ids)]
        else:
            assert outcome.token_ids == tokens
    return num_failed


@CASES
def test_a_single_lack_of_memory_loses_no_token(
    faulty: FaultyRun, expected: list[list[int]], place: str, ahead: bool, first: int
) -> None:
    fault = Fault(OUT_OF_MEMORY["torch"], first, 1)
    step = faulty.engine(fault, place, ahead=ahead)
    num_failed = check_others(run(step, PROMPTS, PARAMS), expected)
    assert fault.num_raised == 1
    if ahead and place in AFTER_BOOKING:
        assert 1 <= num_failed <= SEATS
    else:
        assert num_failed == 0
    assert step.scheduler.blocks.check([]) == []


@pytest.mark.parametrize("make", OUT_OF_MEMORY.values(), ids=OUT_OF_MEMORY)
def test_a_step_that_lacks_memory_twice_fails_alone(
    faulty: FaultyRun, expected: list[list[int]], make: Callable[[], Exception]
) -> None:
    fault = Fault(make, 3, 2)
    step = faulty.engine(fault, "forward", ahead=False)
    assert 1 <= check_others(run(step, PROMPTS, PARAMS), expected) <= SEATS
    assert (fault.num_raised, fault.num_freed) == (2, 1)
    assert step.scheduler.blocks.check([]) == []


@each_kind(HARMLESS)
def test_a_step_that_cannot_be_launched_fails_alone(
    faulty: FaultyRun, expected: list[list[int]], place: str, ahead: bool, first: int, make: Callable[[], Exception]
) -> None:
    fault = Fault(make, first, 1)
    step = faulty.engine(fault, place, ahead=ahead)
    num_failed = check_others(run(step, PROMPTS, PARAMS), expected)
    assert fault.num_raised == 1
    # A launch ahead of the tokens is tried again when they are known.
    assert num_failed <= SEATS
    assert ahead or num_failed >= 1
    assert fault.num_freed == 0
    assert step.scheduler.blocks.check([]) == []


@each_kind(LOST)
def test_a_lost_device_ends_the_engine_and_no_request_gets_a_wrong_token(
    faulty: FaultyRun, expected: list[list[int]], place: str, ahead: bool, first: int, make: Callable[[], Exception]
) -> None:
    step = faulty.engine(Fault(make, first, 10**6), place, ahead=ahead)
    tokens: dict[str, list[int]] = {f"request-{index}": [] for index in range(len(PROMPTS))}
    for index, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        step.scheduler.add(Request(f"request-{index}", prompt, params, arrival_s=index))

    def run_to_the_end() -> None:
        while step.scheduler.has_work():
            for output in step.step():
                assert output.finish_reason is not FinishReason.ERROR
                tokens[output.request_id].extend(output.token_ids)

    with pytest.raises(DeviceLostError):
        run_to_the_end()
    for found, whole in zip(tokens.values(), expected, strict=True):
        assert found == whole[: len(found)]


def test_an_ambiguous_error_is_followed_by_a_device_check(faulty: FaultyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    step = faulty.engine(Fault(lambda: RuntimeError("something odd"), 2, 1), "forward", ahead=False)

    def fails(device: torch.device) -> None:
        raise LOST["illegal-address"]()

    monkeypatch.setattr(baton.engine.engine, "check_device", fails)
    with pytest.raises(DeviceLostError, match="illegal memory access"):
        run(step, PROMPTS, PARAMS)


def test_a_device_without_memory_for_the_check_is_not_lost(
    faulty: FaultyRun, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = faulty.engine(Fault(HARMLESS["launch"], 2, 1), "forward", ahead=False)

    def fails(device: torch.device) -> None:
        raise OUT_OF_MEMORY["torch"]()

    monkeypatch.setattr(baton.engine.engine, "check_device", fails)
    assert check_others(run(step, PROMPTS, PARAMS), expected) >= 1


async def test_streams_of_a_lost_device_end_so_that_others_can_continue_them(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = SchedulerLimits(64, SEATS, runner.loaded.max_model_len)
    served = AsyncEngine(runner, limits)
    served.start()
    monkeypatch.setattr(runner, "forward", Fault(LOST["assert"], 3, 10**6).before(runner.forward))
    with pytest.raises(WorkerLostError):
        await generate_all(served, Request("a", PROMPTS[0], greedy(MAX_TOKENS)))
    await served.closed.wait()
    with pytest.raises(WorkerLostError):
        await generate_all(served, Request("b", PROMPTS[0], greedy(MAX_TOKENS)))
    await served.stop()


@pytest.mark.parametrize("make", [*OUT_OF_MEMORY.values(), *HARMLESS.values()])
def test_an_error_that_keeps_the_context_valid_is_not_a_lost_device(make: Callable[[], Exception]) -> None:
    assert not is_device_lost(make())


@pytest.mark.parametrize("make", [*LOST.values(), *HARMLESS.values()])
def test_only_an_out_of_memory_error_counts_as_one(make: Callable[[], Exception]) -> None:
    assert not is_out_of_memory(make())
