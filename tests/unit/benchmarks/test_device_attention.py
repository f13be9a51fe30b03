"""The check of attention kernels tolerates rounding, and fails on wrong results and stray accesses."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.core.kv_spec import KVEncoding
from baton.engine.attention.base import AttentionVariant
from baton.engine.attention.torch_sdpa import TorchSDPA
from baton.engine.kv_cache.paged_cache import PagedKVCache
from benchmarks.device_run.attention_cases import TINY, AttentionCase, Sizes, check_case, draw_cases, smallest
from benchmarks.device_run.attention_world import CPU
from benchmarks.device_run.part import Setting, device_named
from benchmarks.device_run.row_checks import check_fp8_rows, check_int8_rows
from benchmarks.device_run.sanitizer_part import run as run_sanitizer
from benchmarks.device_run.sanitizer_part import summary

SIZES = replace(TINY, dtypes=("float32",), windows=(7,))
CASES = draw_cases(24, SIZES)


class Faulty(TorchSDPA):
    """Computes as it should but for one fault, which needs the cache and what was computed."""

    def __init__(self, cache: PagedKVCache, fault: Callable[..., Any]) -> None:
        super().__init__(cache)
        self.cache, self.fault = cache, fault

    def forward(self, layer: int, query: Any, key: Any, value: Any, batch: Any, variant: AttentionVariant) -> Any:
        changed = self.fault(self, batch, variant, None)
        output = super().forward(layer, query, key, value, batch, changed or variant)
        self.fault(self, batch, variant, output)
        return output


def a_window_that_is_too_long(self: Faulty, batch: Any, variant: AttentionVariant, output: Any) -> Any:
    if output is None and variant.sliding_window:
        return replace(variant, sliding_window=variant.sliding_window - 1)
    return None


def a_row_that_is_not_written(self: Faulty, batch: Any, variant: AttentionVariant, output: Any) -> None:
    if output is not None:
        output[-1, -1] = torch.empty_like(output[-1, -1])


def a_number_that_is_rounded_too_coarsely(self: Faulty, batch: Any, variant: AttentionVariant, output: Any) -> None:
    if output is not None:
        output.copy_(output.half())


def a_key_that_is_read_beyond_the_end(self: Faulty, batch: Any, variant: AttentionVariant, output: Any) -> None:
    if output is not None:
        output[0] += 0 * self.cache.read(0, torch.tensor([len(self.cache.keys[0]) - 1]))[1].sum()


def a_slot_that_is_written_elsewhere(self: Faulty, batch: Any, variant: AttentionVariant, output: Any) -> None:
    if output is not None:
        size = self.cache.spec.block_size
        used = {span.block_ids[-1] for group in batch.groups for span in group.spans}
        self.cache.keys[0][max(used) * size + size - 1] = 0


FAULTS = [value for name, value in list(globals().items()) if name.startswith("a_")]


@pytest.mark.parametrize("name", list(CASES))
def test_a_correct_backend_passes(name: str) -> None:
    row = check_case(CASES[name], TorchSDPA, CPU)
    assert row["ok"], row
    assert row["of_tolerance"] <= 1


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_an_attention_fault_is_found(fault: Callable[..., Any]) -> None:
    rows = [check_case(case, lambda cache: Faulty(cache, fault), CPU) for case in CASES.values()]
    assert not all(row["ok"] for row in rows)
    if fault is not a_window_that_is_too_long:
        assert sum(not row["ok"] for row in rows) > len(rows) // 2


@pytest.mark.parametrize("sizes", [Sizes(), TINY], ids=["full", "tiny"])
def test_cases_cover_all_their_choices_and_are_reproducible(sizes: Sizes) -> None:
    cases = draw_cases(80, sizes)
    assert cases == draw_cases(80, sizes)
    assert cases != draw_cases(80, sizes, seed=1)

    def values(of: Callable[[AttentionCase], object]) -> set[object]:
        return {of(case) for case in cases.values()}

    assert values(lambda case: (case.shape.dtype, case.shape.encoding)) == {
        (dtype, encoding) for dtype in sizes.dtypes for encoding in KVEncoding
    }
    assert values(lambda case: case.shape.key_dim) == set(sizes.key_dims)
    assert values(lambda case: case.shape.share) == {*sizes.shares, *sizes.latents[2]}
    assert values(lambda case: case.shape.block_size) == set(sizes.block_sizes)
    assert values(lambda case: case.window) == {None, *sizes.windows}
    for has in (
        lambda case: case.has_sinks,
        lambda case: case.softcap is not None,
        lambda case: case.padding is not None,
        lambda case: any(span.first_key for span in case.spans),
        lambda case: any(span.start > span.tree_start for span in case.spans if span.parents),
        lambda case: case.shape.value_dim != case.shape.key_dim,
        lambda case: case.shape.has_latents,
    ):
        assert values(has) == {False, True}
    costs = [cases[name].cost for name in smallest(cases, 12)]
    assert max(costs) <= min(case.cost for name, case in cases.items() if name not in smallest(cases, 12))


@pytest.mark.parametrize("check", [check_fp8_rows, check_int8_rows])
def test_attention_rows_pass_on_the_cpu(check: Callable[[torch.device], Any]) -> None:
    rows = list(check(CPU))
    assert len(rows) == 4
    assert all(row["ok"] for row in rows), rows


def test_truncated_rows_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from baton.engine.kv_cache import kv_int8
    from baton.engine.models import fp8_linear

    def truncated(vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        numbers, scales = quantized(vectors)
        return (numbers.abs() - 1).clamp_min(0) * numbers.sign(), scales

    quantized = kv_int8._quantized
    monkeypatch.setattr(kv_int8, "_quantized", truncated)
    assert not all(row["ok"] for row in check_int8_rows(CPU))
    quantize_rows = fp8_linear.quantize_rows
    monkeypatch.setattr(fp8_linear, "quantize_rows", lambda rows: (quantize_rows(rows)[0], quantize_rows(2 * rows)[1]))
    assert not all(row["ok"] for row in check_fp8_rows(CPU))


def test_the_summary_of_the_sanitizer_is_parsed() -> None:
    clean = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
    assert summary([clean], 12)["ok"] is True
    found = summary(
        [clean, "========= Invalid __global__ read of size 4 bytes\n========= ERROR SUMMARY: 3 errors\n"], 12
    )
    assert found["ok"] is False
    assert found["errors_found"] == 3
    assert "Invalid __global__ read of size 4 bytes" in found["traceback"]
    refused = summary(["========= Error: Device not supported\n"], 0)
    assert "ok" not in refused
    assert "Device not supported" in refused["not_run"]


FAKE_TOOL = """#!{python}
import json, sys
print(json.dumps({{"process is ready": True}}), flush=True)
for line in sys.stdin:
    print(json.dumps({{"check row": {{"name": json.loads(line), "ok": True, "worst_error": 0.0}}}}))
    print(json.dumps({{"process is usable": True}}), flush=True)
log = sys.argv[sys.argv.index("--log-file") + 1].replace("%p", "1")
open(log, "w").write("========= ERROR SUMMARY: 2 errors")
"""


def test_errors_reported_at_the_end_of_the_sanitizer_are_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(FAKE_TOOL.format(python=sys.executable))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    *cases, found = run_sanitizer(Setting(device_named("cuda"), "tiny"))
    assert len(cases) == 6
    assert found["cases"] == 6
    assert found["errors_found"] == 2
    assert found["ok"] is False


def test_without_cuda_the_sanitizer_reports_that_it_did_not_run() -> None:
    assert list(run_sanitizer(Setting(CPU, "tiny"))) == [
        {"name": "compute-sanitizer memcheck", "not_run": "needs CUDA"}
    ]
