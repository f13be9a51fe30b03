"""The compile matrix: each Triton kernel as baton launches it, for each compute capability, against a table of figures.

    python -m tests.compile_matrix             prints a summary of the table
    python -m tests.compile_matrix --update    compiles everything with the installed Triton and writes its rows

Triton specializes kernels for the arguments of a launch, so variants are recorded from the backend itself. The table
has one row for each version of Triton, capability and variant. Its figures are exact: a version of Triton brings its
own assembler and gives the same code on every machine, and a tolerance would hide a slow loss.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, dataclass
from multiprocessing import get_context
from pathlib import Path
from unittest import mock

import torch
import triton

from baton.core.drafts import ROOT
from baton.core.kv_spec import KVCacheSpec, KVEncoding, LayerSpec
from baton.engine.attention import triton_paged
from baton.engine.attention.base import AttentionVariant
from baton.engine.attention.paged_plan import PlannedBatch, make_plan
from baton.engine.batch.attention_groups import Span
from baton.engine.kv_cache.paged_cache import PagedKVCache
from baton.engine.models import fp8_kernels
from tests.compile_figures import Figures, figures_of
from tests.triton_launches import Launches

COMPILE_TABLE = Path(__file__).parent / "unit/baton/engine/attention/compile_table.csv"
CAPABILITIES = (80, 89, 90, 100, 120)
"""Compute capabilities times ten: A100, L4 and RTX 40, H100, B200, RTX 50."""
_NUM_HEADS, _NUM_KV_HEADS = 32, 8
_NUM_LATENT_HEADS, _ROTATED_DIM = 128, 64  # of DeepSeek V3
_NUM_PROGRAMS = 528  # four for each multiprocessor of an H100
_FP8_CAPABILITY = 89
_SHORT, _LONG = list(range(64)), list(range(1024))  # blocks of 16 tokens
_TREE = (ROOT, ROOT, 0, 1, 2, 2, 3)
_TILES = {
    "decode": [Span(_SHORT, 1000, 1)] * 64,
    "decode split": [Span(_LONG, 16000, 1)],
    "chain split": [Span(_LONG, 16000, 8)],
    "tree": [Span(_SHORT, 1000, 8, _TREE)] * 64,
    "prefill": [Span(_SHORT, 0, 1000)],
}
"""Spans for each tile: 16 rows for decode, 32 for chains and trees, 64 for prompts."""
_PLAIN, _FULL, _LATENT = "plain", "full", "latent"  # full: with a window, capped scores and attention sinks
_KEY = ("triton", "capability", "kernel", "size", "cache", "tile", "layer")
_FIGURES = ("registers", "spilled", "shared", "reads", "products", "shortfalls")


@dataclass(frozen=True, slots=True)
class Variant:
    """A variant of a kernel.

    Attributes:
        size: size of a head or latent; for ``quantize_row``, of a row.
        cache: a :class:`KVEncoding`; empty if the kernel does not read the cache.
        tile: one of the batches above, or empty.
        layer: ``plain``, ``full`` or ``latent``, or empty.
    """

    kernel: str
    size: int
    cache: str = ""
    tile: str = ""
    layer: str = ""


def cases() -> Iterator[tuple[int, Variant]]:
    """All capabilities and variants of the matrix, in the table's order."""
    sizes, padded_sizes = (64, 128, 256), (96, 192)
    attend = [
        *itertools.product(sizes, KVEncoding, _TILES, (_PLAIN,)),
        *itertools.product(sizes, KVEncoding, [tile for tile in _TILES if tile != "chain split"], (_FULL,)),
        *itertools.product(padded_sizes, KVEncoding, ("decode", "prefill"), (_PLAIN,)),
        *itertools.product((512,), KVEncoding, ("decode", "decode split", "tree", "prefill"), (_LATENT,)),
    ]
    variants = [
        *(Variant("attend", *case) for case in attend),
        *(Variant("merge", size, "", "decode split", layer) for size in sizes for layer in (_PLAIN, _FULL)),
        Variant("merge", 512, "", "decode split", _LATENT),
        *(Variant("quantize_row", size) for size in (576, 4096, 14336)),
    ]
    for capability, variant in itertools.product(CAPABILITIES, variants):
        if variant.kernel != "quantize_row" or capability >= _FP8_CAPABILITY:
            yield capability, variant


def launches_of(variant: Variant, capability: int) -> Launches:
    """The backend's launches for a variant on a device of a compute capability, given times ten."""
    if variant.kernel == "quantize_row":
        launches = Launches(fp8_kernels.quantize_row)
        with mock.patch.object(fp8_kernels, "quantize_row", launches):
            fp8_kernels.quantize_rows_by_kernel(torch.zeros(2, variant.size, dtype=torch.bfloat16))
        return launches
    attend, merge = Launches(triton_paged.attend), Launches(triton_paged.merge)
    has_latents = variant.layer == _LATENT
    num_heads, num_kv_heads = (_NUM_LATENT_HEADS, 1) if has_latents else (_NUM_HEADS, _NUM_KV_HEADS)
    key_dim = _ROTATED_DIM if has_latents else variant.size
    shape = LayerSpec(num_kv_heads, key_dim, variant.size)
    encoding = KVEncoding(variant.cache or KVEncoding.NATIVE)
    spec = KVCacheSpec("model", "bfloat16", 16, (shape,), encoding=encoding)
    layer = AttentionVariant(scaling=0.1, has_latents=has_latents)
    if variant.layer == _FULL:
        sinks = torch.zeros(_NUM_HEADS, dtype=torch.bfloat16)
        layer = AttentionVariant(scaling=0.1, sliding_window=4096, softcap=30.0, sinks=sinks)
    spans = _TILES[variant.tile]
    num_tokens = sum(span.num_tokens for span in spans)
    query_dim = key_dim + variant.size * has_latents
    query, key, value = (
        torch.zeros(num_tokens, heads, dim, dtype=torch.bfloat16)
        for heads, dim in ((num_heads, query_dim), (num_kv_heads, key_dim), (num_kv_heads, variant.size))
    )
    cpu = torch.device("cpu")
    cache = PagedKVCache(spec, len(_SHORT), cpu)
    backend = triton_paged.TritonPaged(cache, num_programs=_NUM_PROGRAMS, capability=capability // 10)
    with mock.patch.multiple(triton_paged, attend=attend, merge=merge):
        backend.forward(
            0,
            query,
            key,
            value,
            PlannedBatch(torch.arange(num_tokens), make_plan(spans, cpu, backend.key_sharing)),
            layer,
        )
    return {"attend": attend, "merge": merge}[variant.kernel]


def row_of(capability: int, variant: Variant) -> dict[str, str]:
    """Compiles a case with the installed Triton and returns its row of the table."""
    figures = figures_of(launches_of(variant, capability).compile(capability), capability)
    key = (triton.__version__, capability / 10, *astuple(variant))
    return dict(zip(_KEY + _FIGURES, map(str, key + _told(figures, capability)), strict=True))


def key_of(row: dict[str, str]) -> tuple[str, ...]:
    return tuple(row[name] for name in _KEY)


def read_table() -> list[dict[str, str]]:
    with COMPILE_TABLE.open(newline="") as file:
        return list(csv.DictReader(file))


def differences(expected: dict[str, str], found: dict[str, str]) -> list[str]:
    """The figures that differ from the table, for better or worse."""
    return [
        f"{name}: the table says {expected[name] or 'none'}, the compiler gives {found[name] or 'none'}"
        for name in _FIGURES
        if expected[name] != found[name]
    ]


def update(capabilities: tuple[int, ...] = CAPABILITIES) -> None:
    """Replaces the rows of the installed version of Triton, one capability at a time."""
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        for capability in capabilities:
            chosen = [case for case in cases() if case[0] == capability]
            _replace(list(pool.map(row_of, *zip(*chosen, strict=True))))


def _replace(rows: list[dict[str, str]]) -> None:
    table = {key_of(row): row for row in (*read_table(), *rows)}
    order = [(str(capability / 10), *map(str, astuple(variant))) for capability, variant in cases()]
    wanted = [key for version in sorted({key[0] for key in table}) for key in ((version, *case) for case in order)]
    with COMPILE_TABLE.open("w", newline="") as file:
        writer = csv.DictWriter(file, _KEY + _FIGURES, lineterminator="\n")
        writer.writeheader()
        writer.writerows(table[key] for key in wanted if key in table)


def summary() -> Iterator[str]:
    """Yields a Markdown table: registers, and spilled bytes in parentheses; two numbers where versions differ."""
    rows = read_table()
    capabilities = list(dict.fromkeys(row["capability"] for row in rows))
    yield "| kernel | cache | layer | " + " | ".join(capabilities) + " |"
    yield "|---" * (3 + len(capabilities)) + "|"
    lines: dict[tuple[str, ...], dict[str, dict[str, None]]] = {}
    for row in rows:
        name = f"{row['kernel']} {row['size']} {row['tile']}".strip()
        cells = lines.setdefault((name, row["cache"], row["layer"]), {})
        cell = row["registers"] + (f" ({row['spilled']})" if row["spilled"] != "0" else "")
        cells.setdefault(row["capability"], {})[cell] = None
    for names, cells in lines.items():
        yield "| " + " | ".join((*names, *(" / ".join(cells.get(each, "")) for each in capabilities))) + " |"


def _told(figures: Figures, capability: int) -> tuple[object, ...]:
    reads, products = " ".join(map(str, figures.reads)), "; ".join(map(str, figures.products))
    shortfalls = " ".join(figures.shortfalls(capability))
    return (figures.registers, figures.spilled, figures.shared, reads, products, shortfalls)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true", help="compile all variants and write their rows")
    if parser.parse_args().update:
        update()
    sys.stdout.writelines(f"{line}\n" for line in summary())
