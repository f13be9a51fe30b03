"""The device of the stream checker: what it lets run when, what it overwrites, and what it reports."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from tests.device_tensors import CUDA, DeviceTensors
from tests.fake_cuda import fake_cuda
from tests.stream_checker import Device, Schedule


@pytest.fixture
def tensors() -> Iterator[DeviceTensors]:
    """Tensors of a device that runs nothing before it must."""
    with fake_cuda(Device(Schedule.latest())) as made:
        yield made


def side() -> torch.cuda.Stream:
    return torch.cuda.Stream(CUDA)


def test_nothing_runs_before_the_host_waits(tensors: DeviceTensors) -> None:
    total = torch.ones(3, device=CUDA) + 1
    assert tensors.device.num_operations == 0
    assert total.cpu().tolist() == [2, 2, 2]


@pytest.mark.parametrize("order", ["none", "event", "stream", "host"])
def test_unordered_streams_are_reported_with_both_places(tensors: DeviceTensors, order: str) -> None:
    stream, values = side(), torch.zeros(4, device=CUDA)
    written = torch.cuda.Event()
    values.add_(1)
    written.record()
    if order == "host":
        written.synchronize()
    with torch.cuda.stream(stream):
        if order == "event":
            stream.wait_event(written)
        if order == "stream":
            stream.wait_stream(torch.cuda.current_stream())  # which is the side stream itself
        doubled = values * 2
    torch.cuda.synchronize()
    assert doubled.cpu().tolist() == [2] * 4
    if order in ("event", "host"):
        assert tensors.device.faults == []
        return
    place = r"\(tests/unit/test_stream_checker\.py:\d+\)"
    with pytest.raises(
        AssertionError, match=rf"mul in stream 1 {place} reads what was written by add_ in stream 0 {place}"
    ):
        tensors.device.check()


def test_disjoint_rows_need_no_order(tensors: DeviceTensors) -> None:
    cache, rows = torch.zeros(8, 3, device=CUDA), torch.ones(2, 3, device=CUDA)
    places = [torch.tensor(each, device=CUDA) for each in ([0, 1], [1, 5], [6, 7])]
    ready = torch.cuda.Event()
    ready.record()
    cache.index_copy_(0, places[0], rows)
    for place in places[1:]:
        stream = side()
        stream.wait_event(ready)
        with torch.cuda.stream(stream):
            cache.index_copy_(0, place, rows)
    torch.cuda.synchronize()
    (fault,) = tensors.device.faults
    assert fault.startswith("index_copy_ in stream 1 ")


@pytest.mark.parametrize("recorded", [False, True])
def test_memory_used_by_another_stream_must_be_recorded(tensors: DeviceTensors, *, recorded: bool) -> None:
    stream, values = side(), torch.ones(4, device=CUDA)
    stream.wait_stream(torch.cuda.default_stream())
    with torch.cuda.stream(stream):
        doubled = values * 2
    if recorded:
        values.record_stream(stream)
    del values  # the default stream may have it now
    torch.zeros(1, device=CUDA).cpu()
    torch.cuda.synchronize()
    faults = tensors.device.faults
    assert bool(faults) is not recorded
    assert all("memory reused" in fault for fault in faults)
    assert doubled is not None


def test_pinned_memory_is_not_reused_before_it_is_copied(tensors: DeviceTensors) -> None:
    source = torch.arange(4.0).pin_memory()
    view = source.numpy()
    uploaded = source.to(CUDA, non_blocking=True)
    del source, view
    torch.empty(8, device=CUDA).fill_(0)  # the next allocation
    assert uploaded.cpu().tolist() == [0, 1, 2, 3]


def test_pinned_memory_has_the_content_last_written_by_the_host(tensors: DeviceTensors) -> None:
    source = torch.arange(4.0).pin_memory()
    uploaded = source.to(CUDA, non_blocking=True)
    source.fill_(7)
    assert uploaded.cpu().tolist() == [7, 7, 7, 7]
    pageable = torch.arange(4.0)
    uploaded = pageable.to(CUDA, non_blocking=True)
    pageable.fill_(7)
    assert uploaded.cpu().tolist() == [0, 1, 2, 3]


def test_a_download_is_empty_before_it_is_awaited(tensors: DeviceTensors) -> None:
    values, there = torch.arange(4, device=CUDA), torch.empty(4, dtype=torch.int64, pin_memory=True)
    there.copy_(values, non_blocking=True)
    assert there.tolist() == [-1] * 4
    torch.cuda.synchronize()
    assert there.tolist() == [0, 1, 2, 3]


def test_a_recording_replays_over_the_same_memory_and_cannot_wait(tensors: DeviceTensors) -> None:
    values, total = torch.ones(2, device=CUDA), torch.zeros(2, device=CUDA)

    def add() -> None:
        total.add_(values)

    replay = tensors.device.record(add)
    assert total.cpu().tolist() == [0, 0]
    replay()
    values.fill_(5)
    replay()
    assert total.cpu().tolist() == [6, 6]
    with pytest.raises(RuntimeError, match="while it is recorded"):
        tensors.device.record(lambda: bool(total[0] > 1))


def test_a_failure_is_reported_at_its_launch(tensors: DeviceTensors) -> None:
    torch.zeros(4, 2, device=CUDA).index_select(0, torch.tensor([9], device=CUDA))
    with pytest.raises(
        AssertionError, match=r"index_select in stream 0 \(tests/unit/test_stream_checker.py:\d+\) failed"
    ):
        tensors.device.check()


def test_host_and_device_tensors_do_not_mix(tensors: DeviceTensors) -> None:
    with pytest.raises(RuntimeError, match="of the device and of the host"):
        torch.ones(2, device=CUDA) + torch.ones(2)
    with pytest.raises(TypeError, match="to numpy"):
        torch.ones(2, device=CUDA).numpy()


@pytest.mark.parametrize("seed", range(5))
def test_every_legal_order_gives_the_result_of_one_stream(seed: int) -> None:
    """A chain of operations that hops between streams, each behind an event of the one before."""
    device = Device(Schedule(random.Random(seed), (0.3, 0.6, 0.1)))
    with fake_cuda(device):
        streams, values = [side() for _ in range(3)], torch.zeros(1, device=CUDA)
        last = torch.cuda.Event()
        last.record()
        for step in range(12):
            stream = streams[random.Random(seed * 100 + step).randrange(3)]
            stream.wait_event(last)
            with torch.cuda.stream(stream):
                values.mul_(2).add_(step)
                last = torch.cuda.Event()
                last.record()
        last.synchronize()
        found = values.cpu().item()
    expected = 0
    for step in range(12):
        expected = expected * 2 + step
    assert found == expected
    device.check()
