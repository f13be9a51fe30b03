"""Two copies of a tiny model, one of which uses recorded steps, and batches that both compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from baton.core.drafts import Draft, ScheduledSequence
from baton.core.kv_spec import KVEncoding
from baton.core.request import Request, SamplingParams
from baton.engine.attention.base import AttentionBackend
from baton.engine.batch.batch import ForwardBatch
from baton.engine.kv_cache.paged_cache import PagedKVCache
from baton.engine.models.model_loader import prepare_model
from baton.engine.runner.cuda_graphs import Bucket, GraphedForward, make_buckets
from baton.engine.runner.forward_pass import ForwardPass, TransformersForward
from tests.graph_tape import Tape, TapeRecorder
from tests.plan_attention import PlanAttention, TapedPlanAttention
from tests.tiny_models import VOCAB_SIZE, tiny_model

CPU = torch.device("cpu")
BLOCK_SIZE = 4
NUM_BLOCKS = 64
MAX_MODEL_LEN = 40
MAX_SEQS, MAX_DRAFT = 5, 3
FEATURES = (1,)
# With int8, a difference of one is within rounding.
_TOLERANCE = {KVEncoding.NATIVE: (1e-4, 1e-5), KVEncoding.INT8: (0.05, 0.05)}


@dataclass
class StepSequence:
    """A sequence with ``num_known`` cached tokens, followed by ``num_new`` new tokens and the draft."""

    num_known: int
    num_new: int = 1
    parents: tuple[int, ...] = ()
    prompt_logprobs: int | None = None

    def scheduled(self, index: int, blocks: list[int]) -> ScheduledSequence:
        tokens = [(7 * place + 13 * index) % VOCAB_SIZE for place in range(self.num_known + self.num_new)]
        params = SamplingParams(prompt_logprobs=self.prompt_logprobs)
        request = Request(str(index), tokens, params, num_computed_tokens=self.num_known, block_ids=blocks)
        return ScheduledSequence(request, self.num_new, Draft(tuple(range(3, 3 + len(self.parents))), self.parents))


class Rerunning(TapeRecorder):
    """Runs the Python code again instead of a tape, which hides decisions in Python."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        run()

        def replay() -> None:
            self.num_replays += 1
            run()

        return replay


class GraphedPair:
    """Two copies of a model.

    Attributes:
        models: the plain model, and the one with recorded steps.
    """

    def __init__(
        self,
        create_model: Callable[[], PreTrainedModel] = tiny_model,
        buckets: Sequence[Bucket] = tuple(make_buckets(MAX_SEQS, MAX_DRAFT)),
        recorder: TapeRecorder | None = None,
        create_backend: Callable[[PagedKVCache, TapeRecorder], AttentionBackend] = TapedPlanAttention,
        kv_cache: KVEncoding = KVEncoding.NATIVE,
        max_model_len: int = MAX_MODEL_LEN,
    ) -> None:
        self.recorder = recorder or TapeRecorder()
        model = create_model()
        loaded = [prepare_model(each, "float32") for each in (deepcopy(model), model)]
        self.models = [each.model for each in loaded]
        spec = loaded[0].kv_spec(BLOCK_SIZE, "native", kv_cache)
        self.plain_cache = PagedKVCache(spec, NUM_BLOCKS, CPU)
        self.cache = PagedKVCache(spec, NUM_BLOCKS, CPU, scratch=True)
        self.plain = TransformersForward(loaded[0], PlanAttention(self.plain_cache), FEATURES)
        backend = create_backend(self.cache, self.recorder)
        assert backend.key_sharing is not None
        self.inner = TransformersForward(loaded[1], backend, FEATURES)
        self.graphed = GraphedForward(self.inner, self.cache, self.recorder, backend.key_sharing)
        self.graphed.capture(buckets, max_model_len)

    @torch.inference_mode()
    def check(self, sequences: Sequence[StepSequence]) -> bool:
        """Checks that logits, features and cache, but for its scratch block, are equal. Returns whether a graph ran."""
        free = self._fill_caches()
        plan = []
        for index, sequence in enumerate(sequences):
            length = sequence.num_known + sequence.num_new + len(sequence.parents)
            plan.append(sequence.scheduled(index, [free.pop() for _ in range(-(-length // BLOCK_SIZE))]))
        batch = ForwardBatch.build(plan, BLOCK_SIZE, CPU, torch.float32)
        num_replays = self.recorder.num_replays
        logits, expected = self.graphed.forward(batch), self.plain.forward(batch)
        self._assert_close(logits, expected)
        self._assert_close(features_of(self.graphed), features_of(self.plain))
        slots = torch.arange(NUM_BLOCKS * BLOCK_SIZE)
        for layer in range(len(self.cache.spec.layers)):
            for own, plain in zip(self.cache.read(layer, slots), self.plain_cache.read(layer, slots), strict=True):
                self._assert_close(own, plain)
        return self.recorder.num_replays > num_replays

    @torch.inference_mode()
    def tape_of_last(self) -> tuple[Tape, Tape]:
        """The tape of the last graph, and a new tape of the same step with its last batch."""
        number = self.recorder.last_replayed
        assert number is not None
        with self.recorder.taping() as tape:
            self.recorder.runs[number]()
        return self.recorder.tapes[number], tape

    def _fill_caches(self) -> list[int]:
        """Fills both caches with the same random numbers. Returns the blocks in random order."""
        generator = torch.Generator().manual_seed(0)
        slots = torch.arange(NUM_BLOCKS * BLOCK_SIZE)
        for layer, spec in enumerate(self.cache.spec.layers):
            keys, values = (
                torch.randn(len(slots), spec.num_kv_heads, dim, generator=generator)
                for dim in (spec.key_dim, spec.value_dim)
            )
            for cache in (self.plain_cache, self.cache):
                cache.write(layer, slots, keys, values)
        return torch.randperm(NUM_BLOCKS, generator=generator).tolist()

    def _assert_close(self, found: torch.Tensor, expected: torch.Tensor) -> None:
        rtol, atol = _TOLERANCE[self.cache.spec.encoding]
        torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


def features_of(forward_pass: ForwardPass) -> torch.Tensor:
    assert forward_pass.features is not None
    return forward_pass.features.take()
