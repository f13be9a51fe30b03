"""A checkpoint's scheme follows from its config, and a scheme that cannot be read says why."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig, LlamaConfig

from baton.core.errors import UnsupportedModelError
from baton.engine.models.quantized.schemes import check_scheme, scheme_of
from tests.quantized.make_checkpoints import FOLDER

NAMES = {
    "awq": "AWQ (4 bits)",
    "bitsandbytes-fp4": "bitsandbytes (fp4)",
    "bitsandbytes-int8": "bitsandbytes (int8)",
    "bitsandbytes-nf4": "bitsandbytes (nf4)",
    "compressed-fp8": "compressed-tensors (FP8)",
    "compressed-fp8-block": "compressed-tensors (FP8)",
    "compressed-fp8-dynamic": "compressed-tensors (FP8)",
    "compressed-w4a16": "compressed-tensors (W4A16)",
    "compressed-w4a16-asymmetric": "compressed-tensors (W4A16)",
    "compressed-w8a16": "compressed-tensors (W8A16)",
    "compressed-w8a8": "compressed-tensors (W8A8)",
    "fp8-block": "FP8 (blocks of 32 x 32)",
    "fp8-experts": "FP8 (blocks of 32 x 32)",
    "fp8-tensor": "FP8 (one scale per tensor)",
    "gptq": "GPTQ (4 bits)",
    "gptq-by-activation": "GPTQ (4 bits)",
}


def packed(**changes: Any) -> dict[str, Any]:
    """Settings of compressed-tensors."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, **changes}
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}


def config_with(**quantization: Any) -> LlamaConfig:
    return LlamaConfig(quantization_config=quantization)


@pytest.mark.parametrize("folder", sorted(NAMES))
def test_the_scheme_has_a_name(folder: str) -> None:
    scheme = scheme_of(AutoConfig.from_pretrained(FOLDER / folder))
    assert scheme is not None
    assert scheme.name == NAMES[folder]
    check_scheme(scheme, "dequantized")


def test_plain_checkpoints_have_none() -> None:
    assert scheme_of(LlamaConfig()) is None


def test_old_configs_of_bitsandbytes_name_no_method() -> None:
    scheme = scheme_of(config_with(load_in_4bit=True, bnb_4bit_quant_type="nf4"))
    assert scheme is not None
    assert scheme.name == "bitsandbytes (nf4)"


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "aqlm"}, r"checkpoints of aqlm cannot be dequantized; can be: fp8, .*, bitsandbytes"),
        (
            {"quant_method": "gptq", "bits": 3, "group_size": 32},
            r"GPTQ with 3 bits in the format gptq .* can be: 2, 4, 8 bits",
        ),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, r"4 bits in the format marlin"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, r"AWQ with 4 bits in the version gemv"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"format": "nvfp4-pack-quantized", "weights": {"num_bits": 4}}},
            },
            r"format nvfp4-pack-quantized cannot be dequantized; can be: .*pack-quantized",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "int-quantized",
                "config_groups": {"group_0": {"weights": {"num_bits": 8}}},
                "transform_config": {"config_groups": {"u": {}}},
            },
            r"transforms of activations",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "int-quantized",
                "config_groups": {"group_0": {"weights": {"num_bits": 8}}},
                "sparsity_config": {"format": "sparse-24-bitmask"},
            },
            r"the sparsity sparse-24-bitmask",
        ),
        (
            {"quant_method": "gptq", "bits": "four"},
            r"config of gptq cannot be read: bits is 'four'; expected a positive",
        ),
        (
            {"quant_method": "gptq", "bits": 4},
            r"config of gptq cannot be read: 'group_size' is missing",
        ),
        (
            {"quant_method": "fp8", "weight_block_size": 3},
            r"weight_block_size is 3; expected two positive whole numbers",
        ),
        (
            {"quant_method": "fp8", "weight_block_size": [0, 32]},
            r"weight_block_size is \[0, 32\]; expected two positive",
        ),
        ({"quant_method": "awq", "bits": float("inf"), "group_size": 32}, r"bits is inf; expected a positive whole"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf5"}, r"bnb_4bit_quant_type is 'nf5'; expected nf4 or fp4"),
        (packed(num_bits=3), r"weights of int3 cannot be dequantized; can be: int2, int4, int8"),
        (packed(num_bits=4, type="float"), r"weights of float4 cannot be dequantized"),
        (packed(group_size=0), r"group_size is 0; expected a positive whole number"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, r"without a group that has weights"),
        ({}, r"checkpoints of unknown cannot be dequantized"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(quantization: dict[str, Any], message: str) -> None:
    scheme = scheme_of(config_with(**quantization))
    assert scheme is not None
    with pytest.raises(UnsupportedModelError, match=rf"{message}.*[Tt]ake another checkpoint"):
        check_scheme(scheme, "dequantized")


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({}, "cannot read its quantization_config.*quant_method"),
        ({"quant_method": "nonsense"}, "transformers does not know the quant_method 'nonsense'"),
        ({"quant_method": ["fp8"]}, r"transformers does not know the quant_method \['fp8'\]"),
        (packed(num_bits=None), r"read config_groups\.group_0\.weights\.num_bits of its quantization_config: [^\n]*"),
        ({"quant_method": "fp8", "weight_block_size": "x"}, "of fp8 cannot be read"),
        ({"quant_method": "awq", "bits": "four", "group_size": 32}, "of awq cannot be read"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "of gptq cannot be read"),
    ],
)
def test_settings_that_nobody_can_read_are_refused_in_any_format(quantization: dict[str, Any], message: str) -> None:
    scheme = scheme_of(config_with(**quantization))
    assert scheme is not None
    with pytest.raises(UnsupportedModelError, match=rf"{message}.*Take another checkpoint of the model\.$"):
        check_scheme(scheme, "native")
    with pytest.raises(UnsupportedModelError, match=r"\. Take another checkpoint of the model\.$"):
        check_scheme(scheme, "dequantized")


def test_zero_points_of_compressed_tensors_must_be_dequantized() -> None:
    scheme = scheme_of(AutoConfig.from_pretrained(FOLDER / "compressed-w4a16-asymmetric"))
    assert scheme is not None
    with pytest.raises(UnsupportedModelError, match=r"\(W4A16\).*zero points.*Set engine\.weights: dequantized"):
        check_scheme(scheme, "native")
