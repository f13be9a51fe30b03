"""Steps recorded with Triton's kernels: launches, frozen with grids and arguments, fit every batch of a bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from baton.core.drafts import ROOT
from baton.core.kv_spec import KVEncoding
from baton.engine.attention import paged_plan
from baton.engine.attention.base import AttentionBackend
from baton.engine.attention.key_sharing import KeySharing
from baton.engine.attention.paged_plan import PlannedBatch
from baton.engine.batch.attention_groups import Span
from baton.engine.kv_cache.paged_cache import PagedKVCache
from baton.engine.runner.cuda_graphs import Bucket
from tests.graph_tape import Tape, TapeRecorder
from tests.graphed_pair import CPU, GraphedPair, StepSequence
from tests.interpreted_triton import interpreted_triton
from tests.tiny_models import tiny_model

CreateBackend = Callable[[PagedKVCache, TapeRecorder], AttentionBackend]

# Contexts of MAX_LEN tokens have two pieces; the interpreter is slow.
MIN_KEYS, NUM_PROGRAMS, MAX_LEN = 8, 12, 20
BUCKETS = (Bucket(2, 2),)
# The last launches of a tape: three sequences, and further pieces for each KV head.
TWO_HEADS, LATENTS = ["attend[11, 2]", "merge[4, 4]"], ["attend[22, 1]", "merge[4, 4]"]


@pytest.fixture
def create_backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[CreateBackend]:
    with interpreted_triton():
        from baton.engine.attention import triton_paged

        kernels = (triton_paged.attend, triton_paged.merge)

        def create(cache: PagedKVCache, recorder: TapeRecorder) -> AttentionBackend:
            for name, kernel in zip(("attend", "merge"), kernels, strict=True):
                monkeypatch.setattr(triton_paged, name, recorder.triton_kernel(kernel))
            return triton_paged.TritonPaged(cache, MIN_KEYS, NUM_PROGRAMS)

        yield create
        monkeypatch.undo()


def launches_of(tape: Tape) -> list[str]:
    return [name for name in tape.names if not name.startswith("aten")]


@pytest.mark.parametrize(
    ("name", "kv_cache", "expected"),
    [
        pytest.param("llama", KVEncoding.NATIVE, TWO_HEADS, marks=pytest.mark.thorough(covered_by="[window and cap]")),
        pytest.param("llama", KVEncoding.INT8, TWO_HEADS, marks=pytest.mark.thorough(covered_by="[window and cap]")),
        ("gemma2", KVEncoding.NATIVE, TWO_HEADS),
        ("gpt_oss", KVEncoding.NATIVE, TWO_HEADS),
        pytest.param(
            "deepseek_v3", KVEncoding.NATIVE, LATENTS, marks=pytest.mark.thorough(covered_by="[window and cap]")
        ),
    ],
    ids=["llama", "int8", "window and cap", "sinks and experts", "latent"],
)
def test_recorded_launches_fit_every_batch_of_their_bucket(
    create_backend: CreateBackend, name: str, kv_cache: KVEncoding, expected: list[str]
) -> None:
    pair = GraphedPair(
        partial(tiny_model, name), BUCKETS, create_backend=create_backend, kv_cache=kv_cache, max_model_len=MAX_LEN
    )
    assert pair.check([StepSequence(17, 1, (ROOT,)), StepSequence(1)])
    assert pair.check([StepSequence(6)])
    recorded, anew = pair.tape_of_last()
    assert launches_of(recorded)[-2:] == expected
    assert anew.names == recorded.names
    assert anew == recorded


def test_launches_planned_for_each_batch_differ(create_backend: CreateBackend) -> None:
    """What a tape of them would freeze: the grid of the first batch."""
    pair = GraphedPair(buckets=BUCKETS[:0], create_backend=create_backend)
    tapes = []
    for span in (Span([3], 0, 1), Span([3, 4, 5, 6, 7], 17, 1)):
        plan = paged_plan.make_plan([span], CPU, KeySharing(MIN_KEYS, NUM_PROGRAMS // 2))
        with torch.inference_mode(), pair.recorder.taping() as tape:
            token = torch.full((1,), 5)
            pair.inner.compute(token, token, torch.zeros_like(token), PlannedBatch(token, plan))
        tapes.append(tape)
    assert launches_of(tapes[0]) == ["attend[1, 2]"] * 2
    assert launches_of(tapes[1]) == ["attend[3, 2]", "merge[1, 4]"] * 2


def test_the_interpreter_replaces_kernels_that_are_already_loaded() -> None:
    from baton.engine.attention import triton_paged as compiled

    with interpreted_triton():
        from baton.engine.attention import triton_paged as interpreted
    from baton.engine.attention import triton_paged as again

    assert (compiled.is_interpreted(), interpreted.is_interpreted()) == (False, True)
    assert again is compiled
