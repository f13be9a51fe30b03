"""The layout's description: sizes, fingerprint, and differences in words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.kv_spec import KVCacheSpec, KVEncoding, LayerSpec

SPEC = KVCacheSpec("abc", "bfloat16", 16, (LayerSpec(2, 64, 64), LayerSpec(2, 64, 32)))
CHANGES = {
    "model_fingerprint": replace(SPEC, model_fingerprint="def"),
    "dtype": replace(SPEC, dtype="float16"),
    "block_size": replace(SPEC, block_size=32),
    "layer 1": replace(SPEC, layers=(SPEC.layers[0], LayerSpec(2, 64, 64))),
    "number of layers": replace(SPEC, layers=SPEC.layers[:1]),
}


def test_sizes_in_bytes() -> None:
    assert SPEC.layer_bytes_per_token(0, 1) == 2 * 2 * (64 + 64)
    assert SPEC.layer_bytes_per_token(1, 2) == 2 * 2 * (64 + 32)
    assert SPEC.layer_bytes_per_token(1, 1) == 0
    assert SPEC.bytes_per_token == 2 * 2 * (64 + 64 + 64 + 32)
    assert replace(SPEC, dtype="float32").bytes_per_token == 2 * SPEC.bytes_per_token


def test_int8_is_a_byte_for_each_number_and_four_for_each_vector() -> None:
    assert SPEC.layer_bytes_per_token(0, 1, KVEncoding.INT8) == 2 * (64 + 4 + 64 + 4)
    assert SPEC.layer_bytes_per_token(0, 2, KVEncoding.INT8) == 2 * (64 + 4 + 64 + 4) + 2 * (64 + 4 + 32 + 4)
    assert replace(SPEC, dtype="float32").layer_bytes_per_token(1, 2, KVEncoding.INT8) == 2 * (64 + 4 + 32 + 4)
    for dtype in ("float32", "bfloat16"):
        spec = replace(SPEC, dtype=dtype)
        assert spec.layer_bytes_per_token(0, 2, KVEncoding.NATIVE) == spec.bytes_per_token


def test_json_keeps_everything() -> None:
    copy = KVCacheSpec.from_json(SPEC.to_json())
    assert copy == SPEC
    assert copy.fingerprint() == SPEC.fingerprint()
    assert copy.differences(SPEC) == []


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_every_change_shows_in_the_fingerprint_and_is_named(name: str) -> None:
    other = CHANGES[name]
    assert other.fingerprint() != SPEC.fingerprint()
    (difference,) = SPEC.differences(other)
    assert difference.startswith(f"{name}: ")
    assert " here, " in difference
    assert difference.endswith(" there")


def test_all_differences_are_listed() -> None:
    other = replace(SPEC, dtype="float32", block_size=8, layers=())
    assert [text.split(":")[0] for text in SPEC.differences(other)] == ["dtype", "block_size", "number of layers"]
