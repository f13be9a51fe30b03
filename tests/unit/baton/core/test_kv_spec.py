"""The KV layout: sizes, fingerprint, and differences as text."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.core.kv_spec import KVCacheSpec, KVEncoding, LayerSpec

SPEC = KVCacheSpec("abc", "bfloat16", 16, (LayerSpec(2, 64, 64), LayerSpec(2, 64, 32)))
CHANGES = {
    "model_fingerprint": replace(SPEC, model_fingerprint="def"),
    "dtype": replace(SPEC, dtype="float16"),
    "block_size": replace(SPEC, block_size=32),
    "layer 1": replace(SPEC, layers=(SPEC.layers[0], LayerSpec(2, 64, 64))),
    "number of layers": replace(SPEC, layers=SPEC.layers[:1]),
    "encoding": replace(SPEC, encoding=KVEncoding.INT8),
}


def test_sizes_in_bytes_match_the_layout() -> None:
    assert SPEC.layer_bytes_per_token(0, 1) == 2 * 2 * (64 + 64)
    assert SPEC.layer_bytes_per_token(1, 2) == 2 * 2 * (64 + 32)
    assert SPEC.layer_bytes_per_token(1, 1) == 0
    assert SPEC.bytes_per_token == 2 * 2 * (64 + 64 + 64 + 32)
    assert replace(SPEC, dtype="float32").bytes_per_token == 2 * SPEC.bytes_per_token


def test_int8_takes_one_byte_per_number_and_four_per_vector() -> None:
    assert SPEC.layer_bytes_per_token(0, 1, KVEncoding.INT8) == 2 * (64 + 4 + 64 + 4)
    assert SPEC.layer_bytes_per_token(0, 2, KVEncoding.INT8) == 2 * (64 + 4 + 64 + 4) + 2 * (64 + 4 + 32 + 4)
    assert replace(SPEC, dtype="float32").layer_bytes_per_token(1, 2, KVEncoding.INT8) == 2 * (64 + 4 + 32 + 4)
    for dtype in ("float32", "bfloat16"):
        spec = replace(SPEC, dtype=dtype)
        assert spec.layer_bytes_per_token(0, 2, KVEncoding.NATIVE) == spec.bytes_per_token


def test_an_int8_cache_keeps_native_drafts() -> None:
    spec = replace(SPEC, encoding=KVEncoding.INT8).with_draft("draft", (LayerSpec(1, 8, 8),))
    assert [spec.kept_as(layer) for layer in range(3)] == [KVEncoding.INT8, KVEncoding.INT8, KVEncoding.NATIVE]
    assert spec.layer_bytes_per_token(0, 2) == SPEC.layer_bytes_per_token(0, 2, KVEncoding.INT8)
    assert spec.bytes_per_token == spec.layer_bytes_per_token(0, 2) + 2 * (8 + 8)


@pytest.mark.parametrize("spec", [SPEC, replace(SPEC, encoding=KVEncoding.INT8)])
def test_json_preserves_every_field(spec: KVCacheSpec) -> None:
    copy = KVCacheSpec.from_json(spec.to_json())
    assert copy == spec
    assert copy.encoding is spec.encoding
    assert copy.fingerprint() == spec.fingerprint()
    assert copy.differences(spec) == []


def test_an_unknown_encoding_is_refused() -> None:
    with pytest.raises(ValueError, match="int3"):
        KVCacheSpec.from_json(SPEC.to_json().replace("native", "int3", 1).replace("native", "int3", 1))


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_every_difference_changes_the_fingerprint_and_is_named(name: str) -> None:
    other = CHANGES[name]
    assert other.fingerprint() != SPEC.fingerprint()
    (difference,) = SPEC.differences(other)
    assert difference.startswith(f"{name}: ")
    assert " here, " in difference
    assert difference.endswith(" there")


def test_all_differences_are_listed() -> None:
    other = replace(SPEC, dtype="float32", block_size=8, layers=())
    assert [text.split(":")[0] for text in SPEC.differences(other)] == ["dtype", "block_size", "number of layers"]
