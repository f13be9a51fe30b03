"""The tape does what a CUDA graph does: the same operations in the same memory, with the numbers of the recording."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.graph_tape import FreedMemoryError, NotRecordableError, Tape, TapeRecorder


def tape_of(run: Callable[[], Any]) -> Tape:
    with torch.inference_mode(), TapeRecorder().taping() as tape:
        run()
    return tape


def test_a_tape_uses_the_memory_of_the_recording() -> None:
    source, target = torch.arange(6.0), torch.zeros(2, 2)

    def run() -> None:
        doubled = source.view(2, 3) * 2  # memory of the tape
        doubled[:, 0].add_(1)  # through a view of it
        target.copy_(doubled[:, :2])
        target.t()[0].neg_()

    tape = tape_of(run)
    assert tape.names == ["aten.mul.Tensor", "aten.add_.Tensor", "aten.copy_.default", "aten.neg_.default"]
    for _ in range(2):
        source.mul_(10)
        tape.replay()
        expected = source.view(2, 3)[:, :2] * 2 + torch.tensor([1, 0])
        assert torch.equal(target, expected * torch.tensor([-1, 1]))


def test_python_and_host_numbers_are_frozen() -> None:
    number, target = [3.0], torch.zeros(2)
    tape = tape_of(lambda: target.fill_(number[0]).add_(torch.tensor(number[0])))
    number[0] = 5.0
    target.zero_()
    tape.replay()
    assert target.tolist() == [6, 6]


def test_memory_written_only_during_the_recording_becomes_nan() -> None:
    recorder, target, written = TapeRecorder(), torch.zeros(2), []

    def write_once(out: torch.Tensor) -> None:
        if not written:
            written.append(out.zero_())

    with torch.inference_mode(), recorder.taping() as tape:
        scratch = torch.empty(2)
        recorder.kernel("write_once", write_once)(scratch)
        target.copy_(scratch)
    tape.replay()
    assert target.isnan().all()


def test_a_kernel_gets_the_recorded_arguments_and_current_memory() -> None:
    recorder, source, target = TapeRecorder(), torch.ones(3), torch.zeros(1)

    def add_up(values: torch.Tensor, count: int, out: torch.Tensor) -> None:
        out[0] = sum(values[:count].tolist())  # no operation of the device

    kernel, count = recorder.kernel("add_up", add_up), 2
    with torch.inference_mode(), recorder.taping() as tape:
        kernel(source, count, out=target)
    source.fill_(7)
    count = 3
    tape.replay()
    assert (tape.names, target.tolist()) == (["add_up"], [14])


def test_freed_memory_is_detected_at_the_end_of_a_tape_or_when_it_runs() -> None:
    target, kept = torch.zeros(2), [torch.ones(2)]
    recorder = TapeRecorder()
    unknown = recorder.kernel("unknown", lambda: torch.ones(2))
    with (
        pytest.raises(FreedMemoryError, match=r"aten\.copy_\.default use was freed"),
        torch.inference_mode(),
        recorder.taping(),
    ):
        target.copy_(unknown())
    tape = tape_of(lambda: target.copy_(kept[0]))
    kept[0] = torch.ones(2)
    with pytest.raises(FreedMemoryError):
        tape.replay()


VALUES, MASK, COUNTS = torch.arange(4.0), torch.tensor([True, False, True, True]), torch.tensor([1, 0, 2, 1])


@pytest.mark.parametrize(
    "run",
    [
        lambda: VALUES.max().item(),
        lambda: bool(MASK.any()),
        lambda: VALUES[: int(COUNTS[0])],
        lambda: VALUES.tolist(),
        lambda: VALUES.numpy(),
        lambda: VALUES.cpu(),
        lambda: torch.equal(VALUES, VALUES),
        lambda: MASK.nonzero(),
        lambda: torch.where(MASK),
        lambda: VALUES[MASK],
        lambda: VALUES.clone().index_put_((MASK,), torch.zeros(3)),
        lambda: VALUES.masked_select(MASK),
        lambda: VALUES.repeat_interleave(COUNTS),
        lambda: COUNTS.unique(),
        lambda: COUNTS.bincount(),
        lambda: torch.tensor([1, 2]) + COUNTS[:2],
        lambda: torch.as_tensor([1, 2]) + COUNTS[:2],
        lambda: torch.from_numpy(np.ones(2)) + VALUES[:2],
        lambda: VALUES[[0, 1]],
        lambda: torch.nn.functional.one_hot(COUNTS),
    ],
)
def test_operations_that_wait_for_the_device_are_refused(run: Callable[[], Any]) -> None:
    with pytest.raises(NotRecordableError, match="called a synchronizing CUDA operation"):
        tape_of(run)


def test_tapes_differ_by_operations_numbers_and_memory() -> None:
    here, there = torch.zeros(2), torch.zeros(2)
    tape = tape_of(lambda: here.add_(1))
    assert tape == tape_of(lambda: here.add_(1))
    for other in (lambda: here.mul_(1), lambda: here.add_(2), lambda: there.add_(1), lambda: here[:1].add_(1)):
        assert tape != tape_of(other)
