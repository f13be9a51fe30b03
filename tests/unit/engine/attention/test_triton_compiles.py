"""The kernels, as the backend launches them, compile for GPUs that are not there: the interpreter cannot tell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from engine.attention import triton_paged
from engine.attention.base import AttentionVariant
from engine.attention.paged_plan import PlannedBatch, make_plan
from engine.attention_groups import Span
from engine.drafts import ROOT
from engine.kv_cache import PagedKVCache
from engine.kv_spec import KVCacheSpec, KVEncoding, LayerSpec

CPU = torch.device("cpu")
POINTERS = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32", torch.int8: "*i8"}


class Launches:
    """Keeps what would be launched."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **kwargs: self.calls.append((args, kwargs))

    def compile(self, capability: int) -> str:
        """PTX of the last launch."""
        args, kwargs = self.calls[-1]
        warps = {name: kwargs.pop(name) for name in ("num_warps",) if name in kwargs}
        named = {**dict(zip(self.kernel.arg_names, args, strict=False)), **kwargs}
        signature = {name: "constexpr" if name in kwargs else kind_of(value) for name, value in named.items()}
        constants = {(self.kernel.arg_names.index(name),): value for name, value in kwargs.items()}
        divisible = {
            (index,): [["tt.divisibility", 16]]
            for index, name in enumerate(self.kernel.arg_names)
            if signature[name].startswith("*") or (name.endswith("_stride") and named[name] % 16 == 0)
        }
        source = ASTSource(self.kernel, signature, constants, divisible)
        return str(compile(source, target=GPUTarget("cuda", capability, 32), options=warps).asm["ptx"])


def kind_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


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
