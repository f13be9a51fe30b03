"""The kernels, as baton launches them, compile for GPUs that are not there, at the cost that a table states.

After a change of the kernels or of Triton, ``make update-compile-table`` writes the table anew; read its diff.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton

from tests.compile_figures import SHARED_LIMITS, SHORTFALLS, Figures, Product, figures_of
from tests.compile_matrix import Variant, cases, differences, key_of, launches_of, read_table, row_of, summary

_ROOT = Path(__file__).parents[5]
_QUICK = (
    (80, Variant("attend", 64, "native", "tree", "full")),
    (89, Variant("attend", 64, "native", "decode", "plain")),
    (90, Variant("attend", 128, "native", "prefill", "plain")),
    (90, Variant("attend", 128, "int8", "decode split", "plain")),
    (90, Variant("merge", 128, "", "decode split", "full")),
    (90, Variant("quantize_row", 14336)),
    (100, Variant("attend", 64, "native", "prefill", "full")),
    (120, Variant("attend", 128, "native", "chain split", "plain")),
)
_TABLE = {key_of(row): row for row in read_table()}


def _named(case: tuple[int, Variant]) -> str:
    capability, variant = case
    words = (variant.kernel, variant.size, variant.cache, variant.tile, variant.layer)
    return "-".join(str(word).replace(" ", "-") for word in (capability, *words) if word)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id=_named(case),
            marks=() if case in _QUICK else pytest.mark.thorough(covered_by=f"[-{case[1].kernel}-]"),
        )
        for case in cases()
    ],
)
def test_kernel_costs_match_the_table(case: tuple[int, Variant]) -> None:
    found = row_of(*case)
    if not any(row["triton"] == triton.__version__ for row in _TABLE.values()):
        pytest.skip(f"the table has no figures of Triton {triton.__version__}; it compiles and can be launched")
    assert not differences(_TABLE[key_of(found)], found)


def test_the_table_has_every_case_of_every_pinned_version_once() -> None:
    pins = [(_ROOT / name).read_text() for name in ("constraints.txt", "tests/triton_versions.txt")]
    versions = {version for pin in pins for version in re.findall(r"^triton==(\S+)$", pin, re.M)}
    wanted = Counter(
        (version, str(capability / 10), variant.kernel, str(variant.size), variant.cache, variant.tile, variant.layer)
        for version in versions
        for capability, variant in cases()
    )
    assert len(versions) == 2
    assert Counter(key_of(row) for row in read_table()) == wanted


@pytest.mark.parametrize(
    ("capability", "size", "cache", "num_warps"),
    [
        (90, 128, "native", 4),
        (90, 256, "native", 4),
        (90, 128, "int8", 4),
        (90, 256, "int8", 8),
        (80, 64, "native", 4),
        (80, 128, "native", 8),
        (100, 64, "native", 8),
        (120, 64, "int8", 4),
    ],
)
def test_prompts_have_four_warps_where_registers_suffice(
    capability: int, size: int, cache: str, num_warps: int
) -> None:
    (_, constants) = launches_of(Variant("attend", size, cache, "prefill", "plain"), capability).calls[-1]
    assert constants["num_warps"] == num_warps


def test_shortfalls_in_the_table_are_explained() -> None:
    named = {name for row in _TABLE.values() for name in row["shortfalls"].split()}
    assert named <= SHORTFALLS.keys()
    assert {"narrow", "repeats"} <= named, "known until int8 rows and the tile of prompts are mended"


def test_the_summary_shows_each_variant_once() -> None:
    header, _, *lines = summary()
    assert header.count("|") == 9
    assert len(lines) == len({key[2:] for key in _TABLE})
    assert all(line.count("|") == header.count("|") for line in lines)


def test_deviations_from_the_table_are_reported_in_both_directions() -> None:
    row = next(row for row in _TABLE.values() if row["spilled"] != "0")
    for registers, spilled in (("1", "0"), ("256", "99999")):
        found = {**row, "registers": registers, "spilled": spilled}
        assert differences(row, found) == [
            f"registers: the table says {row['registers']}, the compiler gives {registers}",
            f"spilled: the table says {row['spilled']}, the compiler gives {spilled}",
        ]
    assert not differences(row, dict(row))


def test_forced_register_spills_are_found() -> None:
    launches = launches_of(Variant("attend", 64, "native", "decode", "plain"), 90)
    forced = figures_of(launches.compile(90, maxnreg=48), 90)
    assert forced.registers <= 48
    assert forced.spilled > 0
    assert forced.shortfalls(90) == ["spills"]


def test_misaligned_rows_are_found() -> None:
    """Heads of 64 numbers, each followed by two more, as int8 rows are followed by their scales."""
    launches = launches_of(Variant("attend", 64, "native", "decode", "plain"), 90)
    args, kwargs = launches.calls[-1]
    names = launches.kernel.arg_names
    strides = {"key_slot_stride": 8 * 66, "key_head_stride": 66}
    launches.calls.append((tuple(strides.get(names[i], arg) for i, arg in enumerate(args)), kwargs))
    found = figures_of(launches.compile(90), 90)
    assert found.reads == (2, 16)
    assert "narrow" in found.shortfalls(90)


@pytest.mark.parametrize(("num_warps", "shortfalls"), [(8, ["repeats", "exchange"]), (4, [])])
def test_warps_with_duplicate_work_are_found(num_warps: int, shortfalls: list[str]) -> None:
    """64 rows of a prompt's tile hold four warps' rows of 16 on capability 9.0, not eight's."""
    launches = launches_of(Variant("attend", 64, "native", "prefill", "plain"), 90)
    found = figures_of(launches.compile(90, num_warps=num_warps), 90)
    assert found.shortfalls(90) == shortfalls
    assert [product.unit for product in found.products] == ["wgmma", "wgmma"]


def test_a_tile_that_does_not_use_the_newest_tensor_cores_is_found() -> None:
    product = Product("mma", (4, 1), (16, 8), 1)
    found = Figures(registers=128, spilled=0, shared=0, reads=(16, 16), products=(product, product), rows=64)
    assert found.shortfalls(89) == []
    assert found.shortfalls(90) == found.shortfalls(100) == ["old-mma"]


def test_excessive_shared_memory_is_refused() -> None:
    compiled = launches_of(Variant("quantize_row", 576), 89).compile(89)
    figures_of(replace(compiled, shared=SHARED_LIMITS[89]), 89)
    with pytest.raises(ValueError, match=r"cannot be launched on capability 8\.9: it asks for \d+ bytes of shared"):
        figures_of(replace(compiled, shared=SHARED_LIMITS[89] + 1), 89)


def test_a_missing_kernel_variable_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(figures_of.__globals__["READS"], "quantize_row", ("renamed",))
    with pytest.raises(ValueError, match="has nothing for `renamed`, only for"):
        figures_of(launches_of(Variant("quantize_row", 576), 90).compile(90), 90)


def test_each_batch_is_named_after_its_tile() -> None:
    rows = {"decode": 16, "decode split": 16, "chain split": 32, "tree": 32, "prefill": 64}
    for tile, expected in rows.items():
        (_, constants) = launches_of(Variant("attend", 64, "native", tile, "plain"), 90).calls[-1]
        assert constants["block_m"] == expected
        assert constants["is_divided"] == tile.endswith("split")
        assert constants["has_trees"] == (tile == "tree")
    args, constants = launches_of(Variant("attend", 64, "int8", "decode split", "full"), 90).calls[-1]
    assert constants["window"]
    assert constants["has_softcap"]
    assert constants["has_sinks"]
    assert constants["is_divided"]
    assert args[1].dtype == torch.int8
