"""The kernels, as the backend launches them, compile for GPUs that are not there: the interpreter cannot tell."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.attention import triton_paged
from engine.attention.base import AttentionVariant
from engine.attention.paged_plan import PlannedBatch, make_plan
from engine.attention_groups import Span
from engine.drafts import ROOT
from engine.kv_cache import PagedKVCache
from engine.kv_spec import KVCacheSpec, KVEncoding, LayerSpec
from tests.triton_launches import Launches

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("capability", "encoding"),
    [
        (80, KVEncoding.NATIVE),
        pytest.param(90, KVEncoding.NATIVE, marks=pytest.mark.thorough),
        pytest.param(80, KVEncoding.INT8, marks=pytest.mark.thorough),
        (90, KVEncoding.INT8),
    ],
)
def test_the_kernels_compile(
    capability: int, encoding: KVEncoding, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tree with everything that a layer can have, then a plain decode step whose context is split."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    attend, merge = Launches(triton_paged.attend), Launches(triton_paged.merge)
    monkeypatch.setattr(triton_paged, "attend", attend)
    monkeypatch.setattr(triton_paged, "merge", merge)
    cache = PagedKVCache(KVCacheSpec("model", "bfloat16", 16, (LayerSpec(1, 64, 64),), encoding=encoding), 64, CPU)
    backend = triton_paged.TritonPaged(cache)
    sinks = torch.zeros(4, dtype=torch.bfloat16)
    everything = AttentionVariant(scaling=0.1, sliding_window=128, softcap=30.0, sinks=sinks)
    tree = Span(list(range(8)), 120, 4, (ROOT, ROOT, 0))
    decode = Span(list(range(64)), 1000, 1)
    for span, variant in ((tree, everything), (decode, AttentionVariant(scaling=0.1))):
        num_tokens = span.num_tokens
        query = torch.zeros(num_tokens, 4, 64, dtype=torch.bfloat16)
        key = torch.zeros(num_tokens, 1, 64, dtype=torch.bfloat16)
        batch = PlannedBatch(torch.arange(num_tokens), make_plan([span], CPU))
        backend.forward(0, query, key, key, batch, variant)
        assert "mma" in attend.compile(capability), "the tensor cores are not used"
    assert len(merge.calls) == 1
    assert "ex2" in merge.compile(capability)
