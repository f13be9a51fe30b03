"""Steps by graphs equal steps without, whatever the batch, its padding, and what the same memory held before.

A tape of operations stands in for a CUDA graph, see :mod:`tests.graph_tape`: all that Python decides is decided when
the tape is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.drafts import ROOT
from baton.core.errors import ConfigError
from baton.core.kv_spec import KVEncoding
from baton.engine.attention import backends as registry
from baton.engine.attention.key_sharing import UNDIVIDED
from baton.engine.attention.paged_plan import StaticPlan
from baton.engine.batch.attention_groups import Span
from baton.engine.batch.batch import ForwardBatch
from baton.engine.models.model_loader import prepare_model
from baton.engine.runner.cuda_graphs import Bucket, GraphedForward, make_buckets
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.runner.options import RunnerOptions
from baton.engine.runner.self_check import check_model
from tests.engine_runs import build_engine, run_tokens
from tests.graph_tape import FreedMemoryError, TapeRecorder
from tests.graphed_pair import (
    BLOCK_SIZE,
    CPU,
    MAX_DRAFT,
    MAX_MODEL_LEN,
    MAX_SEQS,
    GraphedPair,
    Rerunning,
    StepSequence,
    features_of,
)
from tests.plan_attention import TapedPlanAttention
from tests.tiny_models import CONFIGS, build_model, model_with_reference, random_prompts, tiny_model

SMALL = (Bucket(2, 1), Bucket(3, MAX_DRAFT + 1))
CHAIN, TREE, FORK = (ROOT, 0, 1), (ROOT, ROOT, 0), (ROOT, ROOT)
FAST = ("llama", "gemma2", "gpt_oss", "deepseek_v3", "qwen3_moe", "phi", "opt", "olmo3")
WAITING = ("jetmoe",)


@pytest.fixture(scope="module")
def pair() -> GraphedPair:
    return GraphedPair()


TREES = st.sampled_from([(), (ROOT,), (ROOT, 0, 1), (ROOT, ROOT, 0), (ROOT, ROOT, ROOT)])


@settings(deadline=None, max_examples=30, derandomize=True)
@given(steps=st.lists(st.lists(st.tuples(st.integers(0, 30), TREES), min_size=1, max_size=5), min_size=1, max_size=3))
def test_replayed_decode_and_verification_steps_match_eager_ones(
    pair: GraphedPair, steps: list[list[tuple[int, tuple[int, ...]]]]
) -> None:
    for step in steps:
        assert pair.check([StepSequence(num_known, 1, parents) for num_known, parents in step])


@pytest.mark.parametrize("count", range(1, MAX_SEQS + 1))
def test_every_batch_size_is_replayed(pair: GraphedPair, count: int) -> None:
    assert pair.check([StepSequence(5 * index + 1) for index in range(count)])


@pytest.mark.parametrize(
    "sequences",
    [
        [StepSequence(0, 20)],
        [StepSequence(3), StepSequence(2, MAX_DRAFT + 2)],
        [StepSequence(2 * index) for index in range(MAX_SEQS + 1)],
        [StepSequence(MAX_MODEL_LEN + 3 * BLOCK_SIZE)],
    ],
    ids=["a prompt", "a chunk beside a decode", "more sequences", "more blocks"],
)
def test_steps_without_a_bucket_are_computed_eagerly(pair: GraphedPair, sequences: list[Sequence]) -> None:
    assert not pair.check(sequences)
    assert pair.check([StepSequence(3)])


def test_prompts_that_end_with_few_tokens_yield_only_the_requested_rows(pair: GraphedPair) -> None:
    assert pair.check([StepSequence(3, 3), StepSequence(9)])


def test_prompts_that_get_log_probabilities_have_a_row_for_each_token(pair: GraphedPair) -> None:
    """As many rows as tokens, in another order."""
    assert pair.check([StepSequence(3, 3, prompt_logprobs=1), StepSequence(9)])


def test_features_outlive_the_next_step(pair: GraphedPair) -> None:
    batch = ForwardBatch.build([StepSequence(0).scheduled(1, [1])], BLOCK_SIZE, CPU, torch.float32)
    other = ForwardBatch.build([StepSequence(0).scheduled(2, [2])], BLOCK_SIZE, CPU, torch.float32)
    with torch.inference_mode():
        pair.graphed.forward(batch)
        taken = features_of(pair.graphed)
        before = taken.clone()
        pair.graphed.forward(other)
        assert torch.equal(taken, before)
        assert not torch.equal(features_of(pair.graphed), before)


class Failing(TapeRecorder):
    """Has no memory for the third recording."""

    num_discards = 0

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        if len(self.tapes) == 2:
            run()
            raise torch.OutOfMemoryError("Tried to allocate 2 GiB")
        return super().record(run)

    def discard(self) -> None:
        self.num_discards += 1
        super().discard()


def test_after_a_failure_every_step_is_computed_eagerly() -> None:
    recorder = Failing()
    pair = GraphedPair(recorder=recorder)
    failure = pair.graphed.failure
    assert failure is not None
    assert failure.bucket == make_buckets(MAX_SEQS, MAX_DRAFT)[-3], "the largest are recorded first"
    assert failure.missing == tuple(make_buckets(MAX_SEQS, MAX_DRAFT))
    assert (failure.reason, failure.forward_waits) == ("Tried to allocate 2 GiB", False)
    assert failure.describe().startswith(
        f"CUDA graphs are off, and every step runs eagerly: bucket {failure.bucket} could not be recorded, Tried to "
    )
    assert (pair.graphed.num_graphs, recorder.num_discards) == (0, 2)
    assert not pair.check([StepSequence(3), StepSequence(1, 1, TREE)])


def test_equal_buckets_are_recorded_once(pair: GraphedPair) -> None:
    """A worker that comes back to its role has its graphs."""
    buckets = make_buckets(MAX_SEQS, MAX_DRAFT)
    pair.graphed.capture(buckets, MAX_MODEL_LEN)
    assert len(pair.recorder.tapes) == pair.graphed.num_graphs == len(buckets)
    other = GraphedPair()
    other.graphed.capture(buckets[:2], MAX_MODEL_LEN)
    assert len(other.recorder.tapes) == other.graphed.num_graphs == 2
    assert other.check([StepSequence(3)])
    assert not other.check([StepSequence(3)] * MAX_SEQS)


def test_graphs_need_a_scratch_block(pair: GraphedPair) -> None:
    with pytest.raises(ValueError, match="scratch block"):
        GraphedForward(pair.plain, pair.plain_cache, TapeRecorder(), UNDIVIDED)


def assert_steps_are_equal(pair: GraphedPair) -> None:
    """Batches of other sequences, lengths and drafts that use the same graphs, whose tapes are the same for all."""
    steps = [
        [StepSequence(3, 1, TREE), StepSequence(17)],
        [StepSequence(30, 1, CHAIN), StepSequence(0, 2), StepSequence(9, 1, FORK)],
        [StepSequence(1)],
        [StepSequence(14), StepSequence(2)],
    ]
    used = set()
    for step in steps:
        assert pair.check(step)
        used.add(pair.recorder.last_replayed)
        recorded, anew = pair.tape_of_last()
        assert anew.names == recorded.names
        assert anew == recorded
    assert used == {0, 1}, "two steps for each graph"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[] if n in FAST else pytest.mark.thorough(covered_by="[llama]"))
        for n in CONFIGS
        if n not in WAITING
    ],
)
def test_tapes_of_all_architectures_fit_every_batch_of_their_bucket(name: str) -> None:
    assert_steps_are_equal(GraphedPair(lambda: tiny_model(name), SMALL))


def test_tapes_over_an_int8_cache_fit_every_batch_of_their_bucket() -> None:
    assert_steps_are_equal(GraphedPair(buckets=SMALL, kv_cache=KVEncoding.INT8))


@pytest.mark.parametrize("name", WAITING)
def test_models_that_wait_for_the_device_have_no_graphs(name: str) -> None:
    pair = GraphedPair(lambda: tiny_model(name), SMALL)
    assert pair.graphed.failure is not None
    assert pair.graphed.failure.forward_waits
    assert not pair.check([StepSequence(3), StepSequence(17)])


def rescaled_model(rope_type: str) -> transformers.PreTrainedModel:
    """A model whose rotary frequencies depend on the length of a sequence beyond 16 tokens."""
    config: Any = CONFIGS["phi3"]()
    factors = {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4} if rope_type == "longrope" else {"factor": 4.0}
    config.original_max_position_embeddings = 16
    config.rope_parameters = {
        **config.rope_parameters,
        "rope_type": rope_type,
        "original_max_position_embeddings": 16,
        **factors,
    }
    return build_model(config)


@pytest.mark.parametrize("rope_type", ["longrope", "dynamic"])
def test_rotary_frequencies_that_depend_on_lengths_are_not_frozen(rope_type: str) -> None:
    """Either the tape computes them anew, or the model is computed without one."""
    pair = GraphedPair(lambda: rescaled_model(rope_type), SMALL)
    for sequences in ([StepSequence(3)], [StepSequence(30)], [StepSequence(2)]):
        assert pair.check(sequences) == (pair.graphed.failure is None)


def bake_longest(pair: GraphedPair) -> None:
    """Has both models scale their embeddings by a number that Python takes from the batch."""
    longest = 1

    def scale(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output * (1 + longest / 10)

    def note(self: GraphedForward, batch: ForwardBatch) -> torch.Tensor:
        nonlocal longest
        longest = max(sequence.request.num_computed_tokens for sequence in batch.sequences)
        return forward(batch)

    for model in pair.models:
        model.get_input_embeddings().register_forward_hook(scale)
    forward = pair.graphed.forward
    pair.graphed.forward = note.__get__(pair.graphed)  # type: ignore[method-assign]
    pair.graphed.capture(SMALL[:1], MAX_MODEL_LEN)


def test_reading_a_number_from_a_batch_is_detected() -> None:
    step = [StepSequence(7), StepSequence(20)]
    rerunning, taped = GraphedPair(buckets=SMALL, recorder=Rerunning()), GraphedPair(buckets=SMALL)
    bake_longest(rerunning)
    assert rerunning.check(step), "running Python again cannot find it"
    bake_longest(taped)
    with pytest.raises(AssertionError, match="not close"):
        taped.check(step)
    recorded, anew = taped.tape_of_last()
    assert anew != recorded


def test_a_plan_rebuilt_for_each_step_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph knows the address of the first one."""
    step = [StepSequence(7), StepSequence(20)]
    fill = StaticPlan.fill

    def replace(self: StaticPlan, spans: Sequence[Span]) -> None:
        new = StaticPlan(self._size, self._max_tokens, BLOCK_SIZE, self._scratch_block, CPU)
        fill(new, spans)
        self.plan, self._buffer = new.plan, new._buffer

    rerunning, taped = GraphedPair(buckets=SMALL, recorder=Rerunning()), GraphedPair(buckets=SMALL)
    monkeypatch.setattr(StaticPlan, "fill", replace)
    assert rerunning.check(step), "running Python again cannot find it"
    with pytest.raises(FreedMemoryError, match="memory that attend use was freed"):
        taped.check(step)


def test_a_forward_that_reads_from_the_device_is_refused() -> None:
    pair = GraphedPair(buckets=SMALL)
    model = pair.models[1]
    model.get_input_embeddings().register_forward_hook(lambda module, args, output: output * (args[0].max() > 0).item())
    pair.graphed.capture(SMALL[:1], MAX_MODEL_LEN)
    assert pair.graphed.failure is not None
    assert pair.graphed.failure.forward_waits


@given(
    max_num_seqs=st.integers(1, 300),
    max_draft_tokens=st.integers(0, 20),
    num_seqs=st.integers(1, 300),
    tokens=st.integers(1, 21),
)
def test_buckets_have_the_expected_sizes(max_num_seqs: int, max_draft_tokens: int, num_seqs: int, tokens: int) -> None:
    buckets = make_buckets(max_num_seqs, max_draft_tokens, max_tokens=128)
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


def test_whole_requests_match_transformers_through_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy tokens of transformers, with chunked prompts and more requests than one bucket takes."""
    recorder = TapeRecorder()
    monkeypatch.setitem(registry._BACKENDS, "plan", lambda cache: TapedPlanAttention(cache, recorder))
    prompts = random_prompts([9, 4, 13, 2])
    model, expected = model_with_reference("gemma2", prompts, 6)
    runner = ModelRunner(
        prepare_model(model, "float32"),
        64,
        BLOCK_SIZE,
        RunnerOptions(attention_backend="plan", decoder="transformers"),
        recorder=recorder,
    )
    assert not runner.is_fused
    runner.capture_graphs(3, 0, runner.loaded.max_model_len)
    assert runner.num_graphs == 3
    check_model(runner)
    checked = recorder.num_replays
    assert run_tokens(build_engine(runner, chunk_tokens=6), prompts, 6) == expected
    assert recorder.num_replays > checked


def test_off_disables_graphs() -> None:
    loaded = prepare_model(tiny_model("llama"), "float32")
    runner = ModelRunner(
        loaded, 4, BLOCK_SIZE, RunnerOptions(decoder="transformers", cuda_graphs="off"), recorder=TapeRecorder()
    )
    runner.capture_graphs(3, 0, 16)
    assert runner.num_graphs == 0
    assert runner.cache.scratch_block is None


def test_an_unknown_setting_is_refused() -> None:
    loaded = prepare_model(tiny_model("llama"), "float32")
    with pytest.raises(ConfigError, match=r"engine\.cuda_graphs is 'on', but it must be one of: auto, off"):
        ModelRunner(loaded, 4, BLOCK_SIZE, RunnerOptions(cuda_graphs="on"))
