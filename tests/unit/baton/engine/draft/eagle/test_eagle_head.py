"""The compiled pass of an EAGLE-3 head computes what the head's modules do, over the same cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from baton.core.drafts import ROOT
from baton.core.errors import NotFusableError
from baton.engine.attention.backends import create_backend
from baton.engine.batch.attention_groups import Span
from baton.engine.device.uploads import TORCH_DTYPES
from baton.engine.draft.eagle.compiled_pass import FusedHeadPass
from baton.engine.draft.eagle.eagle_checkpoint import load_eagle
from baton.engine.draft.eagle.head import EagleHead
from baton.engine.draft.eagle.head_pass import ModuleHeadPass, create_head_pass
from baton.engine.kv_cache.paged_cache import PagedKVCache
from baton.engine.models.model_loader import prepare_model
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.runner.options import RunnerOptions
from tests.fused_dtypes import FUSED_DTYPES
from tests.tiny_drafts import (
    VOCAB,
    TinyDraft,
    tiny_eagle,
    tiny_eagle3,
    tiny_narrow_eagle3,
    tiny_speculators,
    tiny_target,
)

BLOCK_SIZE, NUM_BLOCKS = 4, 160
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.03}
INT8_TOLERANCE = 0.05
DRAFTS: dict[str, Callable[[], TinyDraft]] = {
    "plain": tiny_eagle3,
    "normed output": lambda: tiny_eagle3(fc_norm=True, norm_output=True),
    "normed residual": tiny_speculators,
    "head norms": lambda: tiny_speculators(kind="qwen3"),
    "own embedding": tiny_narrow_eagle3,
}


class Passes:
    """Both passes of one head, each over a cache of its own that holds no numbers at first."""

    def __init__(self, folder: Path, make: Callable[[], TinyDraft], dtype: str, weights: str = "native") -> None:
        target = tiny_target().to(TORCH_DTYPES[dtype])
        self.head: EagleHead = load_eagle(make().write(folder), target, TORCH_DTYPES[dtype], torch.device("cpu"))
        runner = ModelRunner(
            prepare_model(target, dtype), 1, BLOCK_SIZE, RunnerOptions(decoder="transformers"), draft=self.head
        )
        self.caches = [PagedKVCache(runner.spec, NUM_BLOCKS, torch.device("cpu")) for _ in range(2)]
        for cache in self.caches:
            for tensor in (*cache.keys, *cache.values):
                tensor.fill_(torch.nan)
        layer = len(runner.spec.layers)
        self.modules = ModuleHeadPass(self.head, self.caches[0], create_backend("auto", self.caches[0]), layer)
        self.fused = FusedHeadPass(self.head, self.caches[1], layer, weights)
        self.tolerance = INT8_TOLERANCE if weights == "int8" else TOLERANCE[dtype]
        self._generator = torch.Generator().manual_seed(0)

    def hidden(self, num_rows: int) -> torch.Tensor:
        return torch.randn(num_rows, self.head.hidden_size, generator=self._generator).to(self.head.dtype)

    @torch.inference_mode()
    def run(self, spans: Sequence[Span], hidden: torch.Tensor, *, only_last: bool = False) -> torch.Tensor:
        """Checks a pass; gives what the next one is fed."""
        token_ids = [(31 * index + 7) % VOCAB for index in range(sum(span.num_tokens for span in spans))]
        expected = self.modules.run(spans, token_ids, hidden, only_last=only_last)
        results = self.fused.run(spans, token_ids, hidden, only_last=only_last)
        for result, right in zip(results, expected, strict=True):
            assert result.shape == right.shape
            assert float((result.float() - right.float()).norm()) <= self.tolerance * float(right.float().norm())
        return expected[0]


def blocks(first: int, num_tokens: int) -> list[int]:
    """Enough for the tokens, not in their order in memory."""
    return list(range(first + num_tokens // BLOCK_SIZE, first - 1, -1))


@pytest.mark.parametrize("dtype", FUSED_DTYPES)
@pytest.mark.parametrize("name", DRAFTS)
def test_chains_of_several_sequences_match_the_module(name: str, dtype: str, tmp_path: Path) -> None:
    passes = Passes(tmp_path, DRAFTS[name], dtype)
    a, b, c = blocks(0, 40), blocks(20, 40), blocks(40, 40)
    spans = [Span(a, 0, 1), Span(b, 6, 3, first_key=6), Span(c, 0, 23)]
    fed = passes.run(spans, passes.hidden(27), only_last=True)
    fed = passes.run([Span(a, 1, 1), Span(b, 9, 1, first_key=6), Span(c, 23, 1)], fed)
    passes.run([Span(b, 10, 1, first_key=6), Span(c, 24, 1)], fed[1:])


@pytest.mark.parametrize("dtype", FUSED_DTYPES)
@pytest.mark.parametrize("has_tiles", [False, True])
def test_int8_matches_its_rounded_weights_without_a_matrix_unit(
    has_tiles: bool, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.engine.draft.eagle.compiled_pass.has_tiles", lambda: has_tiles)
    is_native = has_tiles and dtype == "bfloat16"
    passes = Passes(tmp_path, tiny_eagle3, dtype, "native" if is_native else "int8")
    own, spans = blocks(0, 40), [Span(blocks(0, 40), 0, 23)]
    hidden = passes.hidden(23)
    fed = passes.run(spans, hidden, only_last=True)
    passes.run([Span(own, 23, 1)], fed)
    default = FusedHeadPass(passes.head, passes.caches[1], len(passes.caches[1].keys) - 1)
    tokens = list(range(23))
    with torch.inference_mode():
        assert torch.equal(default.run(spans, tokens, hidden)[1], passes.fused.run(spans, tokens, hidden)[1])
        assert not torch.equal(default.run(spans, tokens, hidden)[1], passes.modules.run(spans, tokens, hidden)[1])
    modules, fused = (cache.keys[-1].float().nan_to_num() for cache in passes.caches)
    assert float((modules - fused).norm()) <= TOLERANCE[dtype] * float(modules.norm()), "keys are not of int8"


@pytest.mark.parametrize("dtype", FUSED_DTYPES)
def test_trees_match_the_module_when_their_first_levels_are_cached(dtype: str, tmp_path: Path) -> None:
    passes = Passes(tmp_path, tiny_eagle3, dtype)
    a, b = blocks(0, 90), blocks(40, 40)
    passes.run([Span(b, 3, 9, first_key=3), Span(a, 0, 62)], passes.hidden(71), only_last=True)
    levels = [(ROOT, ROOT, ROOT), (0, 0, 1), (3, 5, 4)]
    parents: tuple[int, ...] = ()
    for level in levels:  # those of the longer sequence cross the end of a chunk of keys
        start = len(parents)
        parents += level
        spans = [Span(b, 12 + start, 3, parents, first_key=3), Span(a, 62 + start, 3, parents)]
        passes.run(spans, passes.hidden(6))


@pytest.mark.parametrize("first_key", [0, 70, 300, 511])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_long_contexts_match_the_module_from_any_first_key(first_key: int, num_threads: int, tmp_path: Path) -> None:
    """Threads share a context of more than 256 keys; what lies before the first key is no number here."""
    passes = Passes(tmp_path, tiny_eagle3, "float32")
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        own = blocks(0, 600)
        count = 560 - first_key
        passes.run([Span(own, first_key, count, first_key=first_key)], passes.hidden(count), only_last=True)
        passes.run([Span(own, 560, 1, first_key=first_key)], passes.hidden(1))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (tiny_eagle, "not an EAGLE-3 head of one layer"),
        (lambda: tiny_speculators(num_layers=2), "not an EAGLE-3 head of one layer"),
        (lambda: tiny_eagle3(hidden_act="gelu"), "activation is gelu"),
    ],
    ids=["eagle-1", "two layers", "gelu"],
)
def test_unsupported_heads_keep_their_modules(make: Callable[[], TinyDraft], reason: str, tmp_path: Path) -> None:
    target = tiny_target()
    head = load_eagle(make().write(tmp_path), target, torch.float32, torch.device("cpu"))
    runner = ModelRunner(prepare_model(target, "float32"), 4, BLOCK_SIZE, draft=head)
    layer = len(runner.spec.layers)
    with pytest.raises(NotFusableError, match=reason):
        FusedHeadPass(head, runner.cache, layer)
    modules = ModuleHeadPass(head, runner.cache, runner.backend, layer)
    assert create_head_pass(head, runner, modules) is modules


@pytest.mark.parametrize(("decoder", "is_fused"), [("fused", True), ("transformers", False)])
def test_the_head_is_computed_like_its_target(*, decoder: str, is_fused: bool, tmp_path: Path) -> None:
    target = tiny_target()
    head = load_eagle(tiny_eagle3().write(tmp_path), target, torch.float32, torch.device("cpu"))
    runner = ModelRunner(prepare_model(target, "float32"), 4, BLOCK_SIZE, RunnerOptions(decoder=decoder), draft=head)
    modules = ModuleHeadPass(head, runner.cache, runner.backend, len(runner.spec.layers))
    assert isinstance(create_head_pass(head, runner, modules), FusedHeadPass) == is_fused
