"""A recording that fails leaves nothing behind: neither on the device, nor in the thread, nor in what is served.

A layer of its own stands in for CUDA, see :mod:`tests.fake_cuda_graphs`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch

from baton.engine.attention import backends as registry
from baton.engine.models.model_loader import prepare_model
from baton.engine.runner.cuda_graphs import make_buckets
from baton.engine.runner.graph_recorder import (
    CudaGraphRecorder,
    ForwardWaitsError,
    RecordingError,
    RecordingMemoryError,
)
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.runner.options import RunnerOptions
from baton.engine.runner.self_check import check_model
from tests.engine_runs import build_engine, run_tokens
from tests.fake_cuda_graphs import PLACES, FakeCuda
from tests.graph_tape import TapeRecorder
from tests.plan_attention import TapedPlanAttention
from tests.tiny_models import model_with_reference, random_prompts, tiny_model

VERSIONS = ("2.11", "2.13", "later")
UNSUPPORTED = "CUDA error: operation not permitted when stream is capturing\nSearch for more in the manual."
MAX_SEQS = 3
NUM_BUCKETS = len(make_buckets(MAX_SEQS, 0))
PROMPTS = random_prompts([7, 4])
NUM_TOKENS = 3


@pytest.fixture(params=VERSIONS)
def cuda(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda(TapeRecorder(), request.param)
    fake.install(monkeypatch)
    return fake


def work(cuda: FakeCuda, target: torch.Tensor) -> Callable[[], None]:
    def run() -> None:
        cuda.compute()
        target.add_(1)

    return run


def assert_nothing_is_left(cuda: FakeCuda) -> None:
    assert cuda.current is cuda.default
    assert cuda.sync_mode == 0
    assert cuda.capturing is None
    assert not cuda.underway
    assert not cuda.references
    assert cuda.num_freed == min(cuda.num_pools, 1)


def test_recordings_share_a_stream_and_a_pool(cuda: FakeCuda) -> None:
    recorder, targets = CudaGraphRecorder(), [torch.zeros(2), torch.zeros(2)]
    replays = [recorder.record(work(cuda, target)) for target in targets]
    before = [target.clone() for target in targets]
    replays[1]()
    assert [(target - old).tolist() for target, old in zip(targets, before, strict=True)] == [[0, 0], [1, 1]]
    assert len(cuda.streams) == cuda.num_pools == 1
    assert cuda.streams[0].waited == [cuda.default] * 2
    assert cuda.default.waited == cuda.streams * 2
    assert cuda.current is cuda.default
    assert list(cuda.references.values()) == [2]
    recorder.discard()
    assert_nothing_is_left(cuda)
    recorder.record(work(cuda, targets[0]))
    assert (len(cuda.streams), cuda.num_pools) == (1, 2), "a pool that is given back is not used again"


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("capture", [0, 1])
@pytest.mark.parametrize(
    "error", [torch.AcceleratorError(UNSUPPORTED), ValueError("no such shape")], ids=["cuda", "python"]
)
def test_a_failed_recording_restores_stream_and_allocator(
    cuda: FakeCuda, place: str, capture: int, error: Exception
) -> None:
    recorder, run = CudaGraphRecorder(), work(cuda, torch.zeros(2))
    cuda.fail(place, capture, error)
    for _ in range(capture):
        recorder.record(run)
    with pytest.raises(RecordingError, match=f"^{type(error).__name__}: {str(error).splitlines()[0]}$"):
        recorder.record(run)
    assert cuda.current is cuda.default
    recorder.discard()
    assert_nothing_is_left(cuda)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("Tried to allocate 2 GiB."), torch.AcceleratorError("CUDA error: out of memory")]
)
def test_a_lack_of_memory_has_its_own_error(cuda: FakeCuda, place: str, error: Exception) -> None:
    recorder = CudaGraphRecorder()
    cuda.fail(place, 0, error)
    with pytest.raises(RecordingMemoryError, match=str(error)):
        recorder.record(work(cuda, torch.zeros(2)))


def test_work_that_waits_is_found_before_capture(cuda: FakeCuda) -> None:
    values = torch.zeros(2)
    with pytest.raises(ForwardWaitsError, match=r"the forward waits for the device at .+:[0-9]+$") as caught:
        CudaGraphRecorder().record(lambda: values.sum().item() and None)
    assert caught.value.place.rpartition(":")[0].endswith(".py")
    assert cuda.num_captures == cuda.num_pools == 0
    assert_nothing_is_left(cuda)


def test_the_reported_place_is_the_innermost_line_outside_torch(cuda: FakeCuda) -> None:
    cuda.fail("probe", 0, RuntimeError("called a synchronizing CUDA operation (Triggered internally)"))
    with pytest.raises(ForwardWaitsError, match=r"tests/fake_cuda_graphs\.py:[0-9]+$"):
        CudaGraphRecorder().record(lambda: cuda.compute())


def test_a_pool_with_a_live_tensor_is_not_released_twice(cuda: FakeCuda) -> None:
    """Its memory is given back once the tensor is gone."""
    recorder, living = CudaGraphRecorder(), [torch.zeros(1)]
    recorder.record(work(cuda, torch.zeros(2)))
    cuda.live = lambda: len(living)
    recorder.discard()
    assert list(cuda.references.values()) == [0]
    living.clear()
    torch.cuda.empty_cache()
    assert_nothing_is_left(cuda)


def test_a_lost_device_is_not_mistaken_for_unrecordable_work(cuda: FakeCuda) -> None:
    recorder = CudaGraphRecorder()
    cuda.fail("body", 0, torch.AcceleratorError("CUDA error: an illegal memory access was encountered"))
    with pytest.raises(RecordingError):
        recorder.record(work(cuda, torch.zeros(2)))
    cuda.is_lost = True
    with pytest.raises(RuntimeError, match="illegal memory access"):
        recorder.discard()
    assert cuda.current is cuda.default


def build_runner(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, name: str = "llama") -> ModelRunner:
    """A runner with graphs, whose forwards the fake layer can make fail."""
    monkeypatch.setitem(registry._BACKENDS, "plan", lambda cache: TapedPlanAttention(cache, cuda.tapes))
    loaded = prepare_model(tiny_model(name), "float32")
    loaded.model.get_decoder().register_forward_pre_hook(lambda *_: cuda.compute())
    return ModelRunner(
        loaded, 64, 4, RunnerOptions(attention_backend="plan", decoder="transformers"), recorder=CudaGraphRecorder()
    )


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return model_with_reference("llama", PROMPTS, NUM_TOKENS)[1]


def test_the_largest_bucket_is_recorded_first_and_tokens_match_the_model(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, expected: list[list[int]]
) -> None:
    runner = build_runner(cuda, monkeypatch)
    runner.capture_graphs(MAX_SEQS, 0, 40)
    assert runner.num_graphs == cuda.num_captures == NUM_BUCKETS
    assert (runner.graph_failure, runner.forward_waits) == (None, False)
    assert run_tokens(build_engine(runner), PROMPTS, NUM_TOKENS) == expected
    assert cuda.tapes.num_replays
    runner.close()
    assert_nothing_is_left(cuda)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("capture", range(NUM_BUCKETS))
def test_one_failure_disables_all_graphs_and_tokens_match_the_model(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    expected: list[list[int]],
    place: str,
    capture: int,
) -> None:
    cuda = FakeCuda(TapeRecorder(), VERSIONS[capture % len(VERSIONS)])
    cuda.install(monkeypatch)
    runner = build_runner(cuda, monkeypatch)
    cuda.fail(place, capture, torch.AcceleratorError(UNSUPPORTED))
    runner.capture_graphs(MAX_SEQS, 0, 40)
    buckets = make_buckets(MAX_SEQS, 0)
    assert cuda.num_captures == capture + (place not in ("warm-up", "probe")), "no other bucket is tried"
    assert runner.num_graphs == 0
    assert_nothing_is_left(cuda)
    failure = runner.graph_failure
    assert failure is not None
    assert failure.bucket == sorted(buckets, key=lambda bucket: -bucket.num_tokens)[capture]
    assert failure.missing == tuple(buckets)
    assert failure.reason == f"AcceleratorError: {UNSUPPORTED.splitlines()[0]}"
    assert not runner.forward_waits
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == [
        f"CUDA graphs are off, and every step runs eagerly: bucket {failure.bucket} could not be recorded, "
        f"{failure.reason} (missing buckets: 1x1 2x1 3x1)"
    ]
    runner.capture_graphs(2, 0, 40)
    assert runner.graph_failure is failure, "a worker that changes its role does not try again"
    assert run_tokens(build_engine(runner), PROMPTS, NUM_TOKENS) == expected
    assert cuda.tapes.num_replays == 0


def test_a_failure_keeps_no_tensor_alive(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """The traceback of an error holds what the forward had computed when it failed."""
    computed: list[weakref.ref[torch.Tensor]] = []

    def fail(*_: object) -> None:
        states = torch.zeros(2)
        computed.append(weakref.ref(states))
        if cuda.capturing is not None:
            error = ValueError("not here")
            raise error  # a cycle: the frame knows the error, and the error knows the frame

    runner = build_runner(cuda, monkeypatch)
    runner.loaded.model.get_decoder().register_forward_pre_hook(fail)
    cuda.live = lambda: sum(reference() is not None for reference in computed)
    runner.capture_graphs(MAX_SEQS, 0, 40)
    assert runner.graph_failure is not None
    assert_nothing_is_left(cuda)


def test_a_lost_device_fails_the_start(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = build_runner(cuda, monkeypatch)

    def lose(*_: object) -> None:
        cuda.is_lost |= cuda.capturing is not None
        if cuda.is_lost:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    runner.loaded.model.get_decoder().register_forward_pre_hook(lose)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        runner.capture_graphs(MAX_SEQS, 0, 40)
    assert cuda.current is cuda.default
    runner.close()


def test_models_that_wait_for_the_device_are_served_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(TapeRecorder())
    cuda.install(monkeypatch)
    runner = build_runner(cuda, monkeypatch, "jetmoe")
    runner.capture_graphs(MAX_SEQS, 0, 40)
    assert runner.forward_waits
    assert cuda.num_captures == 0
    assert_nothing_is_left(cuda)
    check_model(runner)
