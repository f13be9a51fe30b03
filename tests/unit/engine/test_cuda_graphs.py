"""Steps by graphs equal steps without, whatever the batch, its padding, and what the same memory held before.

A recorder that does the recorded work anew over the same memory stands in for CUDA's: it repeats what a graph repeats,
and reads only what the step has put there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention import registry
from engine.batch import ForwardBatch
from engine.cuda_graphs import Bucket, GraphedForward, make_buckets
from engine.drafts import ROOT, Draft
from engine.errors import ConfigError
from engine.forward_pass import ForwardPass, TransformersForward
from engine.kv_cache import PagedKVCache
from engine.model_loader import prepare_model
from engine.model_runner import ModelRunner
from engine.request import Request, SamplingParams
from engine.scheduler import ScheduledSequence
from tests.engine_runs import build_engine, run_tokens
from tests.plan_attention import PlanAttention
from tests.tiny_models import VOCAB_SIZE, model_with_reference, random_prompts, tiny_model

CPU = torch.device("cpu")
BLOCK_SIZE = 4
NUM_BLOCKS = 64
MAX_MODEL_LEN = 40
MAX_SEQS, MAX_DRAFT = 5, 3
FEATURES = (1,)


class Repeating:
    """Implements :class:`engine.cuda_graphs.Recorder`."""

    def __init__(self, failures: int = 0) -> None:
        self.num_records = self.num_replays = 0
        self.failures_left = failures

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        if self.failures_left:
            self.failures_left -= 1
            raise RuntimeError("out of memory")
        self.num_records += 1
        run()

        def replay() -> None:
            self.num_replays += 1
            run()

        return replay


@dataclass
class Sequence:
    """``num_known`` tokens are cached; ``num_new`` follow, then the draft."""

    num_known: int
    num_new: int = 1
    parents: tuple[int, ...] = ()

    def scheduled(self, index: int, blocks: list[int]) -> ScheduledSequence:
        tokens = [(7 * place + 13 * index) % VOCAB_SIZE for place in range(self.num_known + self.num_new)]
        request = Request(str(index), tokens, SamplingParams(), num_computed_tokens=self.num_known, block_ids=blocks)
        return ScheduledSequence(request, self.num_new, Draft(tuple(range(3, 3 + len(self.parents))), self.parents))


class Pair:
    """Two copies of a model, one of them with graphs."""

    def __init__(self, failures: int = 0) -> None:
        self.recorder = Repeating(failures)
        models = [prepare_model(tiny_model("llama"), "float32") for _ in range(2)]
        spec = models[0].kv_spec(BLOCK_SIZE)
        self.plain_cache = PagedKVCache(spec, NUM_BLOCKS, CPU)
        self.cache = PagedKVCache(spec, NUM_BLOCKS, CPU, scratch=True)
        self.plain = TransformersForward(models[0], PlanAttention(self.plain_cache), FEATURES)
        inner = TransformersForward(models[1], PlanAttention(self.cache), FEATURES)
        self.graphed = GraphedForward(inner, self.cache, self.recorder)
        self.graphed.capture(make_buckets(MAX_SEQS, MAX_DRAFT), MAX_MODEL_LEN)

    @torch.inference_mode()
    def check(self, sequences: list[Sequence]) -> bool:
        """Logits, features and all of the cache but the scratch block are equal. Whether a graph computed them."""
        generator = torch.Generator().manual_seed(0)
        pairs = list(zip(tensors_of(self.plain_cache), tensors_of(self.cache), strict=True))
        for plain, own in pairs:
            plain.copy_(torch.randn(plain.shape, generator=generator))
            own[: len(plain)] = plain
        free = torch.randperm(NUM_BLOCKS, generator=generator).tolist()
        plan = []
        for index, sequence in enumerate(sequences):
            length = sequence.num_known + sequence.num_new + len(sequence.parents)
            plan.append(sequence.scheduled(index, [free.pop() for _ in range(-(-length // BLOCK_SIZE))]))
        batch = ForwardBatch.build(plan, BLOCK_SIZE, CPU, torch.float32)
        num_replays = self.recorder.num_replays
        logits, expected = self.graphed.forward(batch), self.plain.forward(batch)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(features_of(self.graphed), features_of(self.plain), rtol=1e-4, atol=1e-5)
        for plain, own in pairs:
            torch.testing.assert_close(own[: len(plain)], plain, rtol=1e-4, atol=1e-5)
        return self.recorder.num_replays > num_replays


def tensors_of(cache: PagedKVCache) -> tuple[torch.Tensor, ...]:
    return (*cache.keys, *cache.values)


def features_of(forward_pass: ForwardPass) -> torch.Tensor:
    assert forward_pass.features is not None
    return forward_pass.features.take()


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair()


TREES = st.sampled_from([(), (ROOT,), (ROOT, 0, 1), (ROOT, ROOT, 0), (ROOT, ROOT, ROOT)])


@settings(deadline=None, max_examples=30, derandomize=True)
@given(steps=st.lists(st.lists(st.tuples(st.integers(0, 30), TREES), min_size=1, max_size=5), min_size=1, max_size=3))
def test_decode_and_verification_steps_are_replayed_and_equal(
    pair: Pair, steps: list[list[tuple[int, tuple[int, ...]]]]
) -> None:
    for step in steps:
        assert pair.check([Sequence(num_known, 1, parents) for num_known, parents in step])


@pytest.mark.parametrize("count", range(1, MAX_SEQS + 1))
def test_every_batch_size_is_replayed(pair: Pair, count: int) -> None:
    assert pair.check([Sequence(5 * index + 1) for index in range(count)])


@pytest.mark.parametrize(
    "sequences",
    [
        [Sequence(0, 20)],
        [Sequence(3), Sequence(2, MAX_DRAFT + 2)],
        [Sequence(2 * index) for index in range(MAX_SEQS + 1)],
        [Sequence(MAX_MODEL_LEN + 3 * BLOCK_SIZE)],
    ],
    ids=["a prompt", "a chunk beside a decode", "more sequences", "more blocks"],
)
def test_steps_without_a_bucket_are_computed_as_before(pair: Pair, sequences: list[Sequence]) -> None:
    assert not pair.check(sequences)
    assert pair.check([Sequence(3)])


def test_prompts_that_end_in_few_tokens_yield_only_the_rows_that_are_wanted(pair: Pair) -> None:
    assert pair.check([Sequence(3, 3), Sequence(9)])


def test_features_outlive_the_next_step(pair: Pair) -> None:
    batch = ForwardBatch.build([Sequence(0).scheduled(1, [1])], BLOCK_SIZE, CPU, torch.float32)
    other = ForwardBatch.build([Sequence(0).scheduled(2, [2])], BLOCK_SIZE, CPU, torch.float32)
    with torch.inference_mode():
        pair.graphed.forward(batch)
        taken = features_of(pair.graphed)
        before = taken.clone()
        pair.graphed.forward(other)
        assert torch.equal(taken, before)
        assert not torch.equal(features_of(pair.graphed), before)


def test_what_cannot_be_recorded_is_computed_as_before(caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair(failures=2)
    buckets = make_buckets(MAX_SEQS, MAX_DRAFT)
    assert pair.graphed.num_graphs == len(buckets) - 2
    assert f"2 of {len(buckets)} CUDA graphs could not be recorded: out of memory" in caplog.text
    assert pair.check([Sequence(3), Sequence(1)])
    assert not pair.check([Sequence(3, 1, (ROOT, ROOT, 0)) for _ in range(MAX_SEQS)])


def test_what_is_recorded_is_recorded_once(pair: Pair) -> None:
    """A worker that comes back to its role has its graphs."""
    buckets = make_buckets(MAX_SEQS, MAX_DRAFT)
    pair.graphed.capture(buckets, MAX_MODEL_LEN)
    assert pair.recorder.num_records == pair.graphed.num_graphs == len(buckets)
    other = Pair()
    other.graphed.capture(buckets[:2], MAX_MODEL_LEN)
    assert other.graphed.num_graphs == 2
    assert other.check([Sequence(3)])
    assert not other.check([Sequence(3)] * MAX_SEQS)


def test_graphs_need_a_scratch_block(pair: Pair) -> None:
    with pytest.raises(ValueError, match="scratch block"):
        GraphedForward(pair.plain, pair.plain_cache, Repeating())


@given(
    max_num_seqs=st.integers(1, 300),
    max_draft_tokens=st.integers(0, 20),
    num_seqs=st.integers(1, 300),
    tokens=st.integers(1, 21),
)
def test_buckets_hold_what_they_shall(max_num_seqs: int, max_draft_tokens: int, num_seqs: int, tokens: int) -> None:
    buckets = make_buckets(max_num_seqs, max_draft_tokens, most_tokens=128)
    assert buckets == sorted(buckets, key=lambda bucket: bucket.num_tokens)
    assert all(bucket.num_tokens <= 128 for bucket in buckets)
    fitting = [b for b in buckets if num_seqs <= b.num_seqs and tokens <= b.tokens_per_seq]
    if num_seqs <= max_num_seqs and tokens <= max_draft_tokens + 1 and 4 * num_seqs * tokens <= 128:
        assert fitting, "no bucket for a step well below the limits"
        assert fitting[0].num_tokens <= 4 * num_seqs * tokens
    if num_seqs > max_num_seqs or tokens > max_draft_tokens + 1:
        assert not fitting


def test_the_largest_step_has_its_own_bucket() -> None:
    assert Bucket(6, 9) in make_buckets(6, 8)
    assert [bucket.tokens_per_seq for bucket in make_buckets(1, 8)] == [1, 2, 4, 8, 9]


def test_whole_requests_through_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy tokens of transformers, with chunked prompts and more requests than one bucket takes."""
    monkeypatch.setitem(registry._BACKENDS, "plan", PlanAttention)
    prompts = random_prompts([9, 4, 13, 2])
    model, expected = model_with_reference("gemma2", prompts, 6)
    recorder = Repeating()
    runner = ModelRunner(
        prepare_model(model, "float32"), 64, BLOCK_SIZE, "plan", None, "transformers", recorder=recorder
    )
    assert not runner.is_fused
    runner.capture_graphs(3, 0, runner.loaded.max_model_len)
    assert runner.num_graphs == 3
    runner.self_check()
    checked = recorder.num_replays
    assert run_tokens(build_engine(runner, chunk_tokens=6), prompts, 6) == expected
    assert recorder.num_replays > checked


def test_off_means_off() -> None:
    loaded = prepare_model(tiny_model("llama"), "float32")
    runner = ModelRunner(loaded, 4, BLOCK_SIZE, decoder="transformers", cuda_graphs="off", recorder=Repeating())
    runner.capture_graphs(3, 0, 16)
    assert runner.num_graphs == 0
    assert runner.cache.scratch_block is None


def test_an_unknown_setting_is_refused() -> None:
    loaded = prepare_model(tiny_model("llama"), "float32")
    with pytest.raises(ConfigError, match=r"engine\.cuda_graphs is 'on', but it must be one of: auto, off"):
        ModelRunner(loaded, 4, BLOCK_SIZE, cuda_graphs="on")
