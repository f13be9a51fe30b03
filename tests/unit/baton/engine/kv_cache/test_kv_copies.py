"""KV copies on an asynchronous device: their order, and the operations that wait for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from unittest.mock import Mock

import pytest
import torch

from baton.core.kv_spec import KVCacheSpec, KVEncoding, LayerSpec
from baton.engine.device.uploads import TORCH_DTYPES
from baton.engine.kv_cache.kv_copies import MAX_BEHIND_BYTES, CudaCopyQueue, copy_queue_for
from baton.engine.kv_cache.paged_cache import PagedKVCache
from tests.fake_cuda import fake_cuda
from tests.late_copies import LateCopies
from tests.stream_checker import Access, Device, Schedule

CPU = torch.device("cpu")
LAYERS = (LayerSpec(2, 4, 4), LayerSpec(1, 8, 4), LayerSpec(2, 4, 1))
NUM_BLOCKS = 8
BLOCKS = [6, 1, 3]
ALL = range(len(LAYERS))
ENCODINGS = list(KVEncoding)


def build(dtype: str, copies: LateCopies | None = None, *, seed: int | None = None) -> PagedKVCache:
    """A cache of zeros, or of random numbers."""
    cache = PagedKVCache(KVCacheSpec("model", dtype, 4, LAYERS), NUM_BLOCKS, CPU, copies=copies)
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        for tensor in (*cache.keys, *cache.values):
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return cache


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("dtype", sorted(TORCH_DTYPES))
@pytest.mark.parametrize("layers", [ALL, range(1, 3)])
def test_exported_bytes_match_an_in_memory_cache(dtype: str, encoding: KVEncoding, layers: range) -> None:
    copies = LateCopies()
    here, there = build(dtype, seed=2), build(dtype, copies, seed=2)
    expected = here.export_bytes(BLOCKS, 1, 11, layers, encoding=encoding)
    mark = there.mark()
    assert there.export_bytes(BLOCKS, 1, 11, layers, encoding=encoding, after=mark) == expected
    room = memoryview(bytearray(len(expected)))
    assert there.export_bytes(BLOCKS, 1, 11, layers, room, encoding) == expected == room
    assert copies.fetched_after == copies.marks
    assert len(copies.marks) == 2  # without one, all that is queued by now


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("dtype", sorted(TORCH_DTYPES))
@pytest.mark.parametrize("staged", [False, True])
def test_imported_data_is_present_after_join(dtype: str, encoding: KVEncoding, *, staged: bool) -> None:
    copies = LateCopies()
    source, target = build(dtype, seed=2), build(dtype, copies)
    exported = bytearray(source.export_bytes(BLOCKS, 1, 11, ALL, encoding=encoding))
    data: memoryview | torch.Tensor | None = memoryview(exported)
    if staged:
        data = target.staging(len(exported))
        assert data is not None
        data.copy_(torch.frombuffer(exported, dtype=torch.uint8))
    mark = target.mark()
    brought = target.import_bytes(BLOCKS, 1, 11, ALL, data, encoding, mark)
    if not staged:
        exported[:] = bytes(len(exported))  # whose memory it was may use it again at once
    assert copies.brought_after == [mark]
    assert not any(tensor.any() for tensor in (*target.keys, *target.values))
    target.join(brought)
    expected = build(dtype)
    expected.import_bytes(BLOCKS, 1, 11, ALL, source.export_bytes(BLOCKS, 1, 11, ALL, encoding=encoding), encoding)
    for there, here in zip((*expected.keys, *expected.values), (*target.keys, *target.values), strict=True):
        assert torch.equal(there, here)


def test_a_wrong_length_is_refused_before_anything_is_queued() -> None:
    copies = LateCopies()
    cache = build("float32", copies)
    size = 8 * cache.spec.layer_bytes_per_token(0, len(LAYERS))
    with pytest.raises(ValueError, match=f"{size} bytes was expected, got {size - 1}"):
        cache.import_bytes([0, 1], 0, 8, ALL, memoryview(bytearray(size - 1)))
    with pytest.raises(ValueError, match=f"{size} bytes was expected, got {size + 1}"):
        cache.import_bytes([0, 1], 0, 8, ALL, torch.zeros(size + 1, dtype=torch.uint8))
    with pytest.raises(ValueError, match=f"{size} bytes was expected, got {size - 1}"):
        cache.export_bytes([0, 1], 0, 8, ALL, memoryview(bytearray(size - 1)))
    assert not copies.num_coming
    assert not copies.fetched_after


def test_round_trip_encoding_is_complete_on_return() -> None:
    here, there = build("bfloat16", seed=5), build("bfloat16", LateCopies(), seed=5)
    for cache in (here, there):
        cache.pass_through([2, 5], 7, KVEncoding.INT8)
    assert torch.equal(here.values[0], there.values[0])
    assert not torch.equal(there.values[0], build("bfloat16", seed=5).values[0])


def test_an_in_memory_cache_needs_no_copies() -> None:
    cache = build("float32")
    assert copy_queue_for(CPU) is None
    assert cache.mark() is None
    assert cache.staging(8) is None
    assert build("float32", LateCopies()).pieces(BLOCKS, 0, 4, ALL) is None
    cache.join(None)
    assert cache.backlog() is None
    assert cache.import_bytes([0], 0, 4, range(1), cache.export_bytes([0], 0, 4, range(1))) is None


@pytest.fixture
def device() -> Iterator[Device]:
    """Runs what the host waits for and what comes before that, and nothing else."""
    device = Device(Schedule.latest())
    with fake_cuda(device):
        yield device


def test_cuda_copies_use_their_own_streams_after_the_computation(device: Device) -> None:
    queue, done = CudaCopyQueue(torch.device("cuda")), list[str]()

    def launch(name: str) -> None:
        def run() -> Sequence[Access]:
            done.append(name)
            return []

        device.launch(name, run)

    launch("step 1")
    mark = queue.mark()
    launch("step 2")
    queue.fetch(lambda: launch("out"), mark)
    assert done == ["step 1", "out"]
    brought = queue.bring(lambda: launch("in"), mark, 8)
    assert "in" not in done, "bringing waits for nothing"
    launch("step 3")
    queue.wait(brought)
    assert done == ["step 1", "out", "in"]
    queue.wait(queue.bring(lambda: launch("in behind step 3"), queue.mark(), 8))
    assert done[3:] == ["step 2", "step 3", "in behind step 3"]
    queue.join(queue.bring(lambda: launch("joined"), mark, 8))
    launch("step 4")
    queue.wait(queue.mark())
    assert done[6:] == ["joined", "step 4"]


def test_a_failed_copy_leaves_nothing_in_flight(device: Device) -> None:
    queue, done = CudaCopyQueue(torch.device("cuda")), list[str]()

    def copy() -> None:
        device.launch("scatter", lambda: done.append("scatter") or [])
        raise torch.OutOfMemoryError("no room for the second group")

    with pytest.raises(torch.OutOfMemoryError):
        queue.bring(copy, queue.mark(), 8)
    assert done == ["scatter"]
    assert queue.backlog() is None


def test_a_thread_waiting_for_cuda_sleeps_instead_of_spinning(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    event = Mock()
    monkeypatch.setattr(torch.cuda, "Event", event)
    CudaCopyQueue(torch.device("cuda")).mark()
    event.assert_called_once_with(blocking=True)


def test_a_sender_waits_for_a_slow_device(device: Device) -> None:
    queue, size = CudaCopyQueue(torch.device("cuda")), MAX_BEHIND_BYTES // 2
    assert queue.backlog() is None
    first, second, *_, last = [queue.bring(lambda: None, queue.mark(), size) for _ in range(4)]
    assert queue.backlog() is second  # when that one is there, two of half the size are left
    queue.wait(first)
    assert queue.backlog() is second
    queue.wait(second)
    assert queue.backlog() is None
    large = queue.bring(lambda: None, queue.mark(), 3 * MAX_BEHIND_BYTES)
    assert queue.backlog() is large
    queue.wait(last)
    assert queue.backlog() is large
    queue.wait(large)
    assert queue.backlog() is None
