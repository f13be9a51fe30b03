"""Writes ``checkpoints/``: one tiny random model per scheme, and what transformers generates from each.

``python -m tests.quantized.make_checkpoints`` needs gptqmodel, optimum, compressed-tensors and bitsandbytes. The tests
read only what it wrote.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
)
from transformers.integrations.finegrained_fp8 import Fp8Quantize

FOLDER = Path(__file__).resolve().parent / "checkpoints"
PROMPT = [5, 17, 100, 42, 9, 77, 120, 8]
NUM_TOKENS = 24
_VOCAB_SIZE = 128
_GROUP = 32
_BLOCK = [32, 32]
_SPREAD = 10.0
"""Factor of the weights, with which random models do not repeat one token."""


def _model(config_class: type[PreTrainedConfig], **settings: Any) -> PreTrainedModel:
    torch.manual_seed(7)
    config = config_class(
        vocab_size=_VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        **settings,
    )
    return _spread(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))


def _plain_model(name: str) -> PreTrainedModel:
    if name == "fp8-experts":
        return _model(Qwen3MoeConfig, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2)
    return _model(LlamaConfig)


def _spread(model: PreTrainedModel) -> PreTrainedModel:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "embed" not in name:
                parameter.mul_(_SPREAD)
    return model


def _with_gptqmodel(folder: Path, plain: Path, **settings: Any) -> None:
    from gptqmodel import GPTQModel, QuantizeConfig

    vocabulary = {f"w{index}": index for index in range(_VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w3"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w3", pad_token="w2").save_pretrained(plain)
    model = GPTQModel.load(str(plain), QuantizeConfig(bits=4, group_size=_GROUP, **settings), device="cpu")
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(3, _VOCAB_SIZE, (64,), generator=generator).tolist() for _ in range(8)]
    model.quantize([{"input_ids": text, "attention_mask": [1] * len(text)} for text in texts], batch_size=1)
    model.save(str(folder))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"].pop("meta")  # it names folders of the machine
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _gptq(folder: Path, plain: Path) -> None:
    _with_gptqmodel(folder, plain, desc_act=False)


def _gptq_by_activation(folder: Path, plain: Path) -> None:
    _with_gptqmodel(folder, plain, desc_act=True, sym=False)


def _awq(folder: Path, plain: Path) -> None:
    from gptqmodel.quantization import FORMAT, METHOD

    _with_gptqmodel(folder, plain, method=METHOD.AWQ, format=FORMAT.GEMM)


def _compressed(preset: str, **changes: Any) -> Callable[[Path, Path], None]:
    def write(folder: Path, plain: Path) -> None:
        from compressed_tensors.compressors import ModelCompressor
        from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme
        from compressed_tensors.quantization.utils import is_module_quantized

        model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
        scheme: Any = preset_name_to_scheme(preset, ["Linear"])
        if scheme.input_activations is not None and scheme.input_activations.group_size:
            scheme.input_activations.group_size = _GROUP
        for name, value in changes.items():
            setattr(scheme.weights, name, value)
        config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"])
        apply_quantization_config(model, config)
        for module in model.modules():
            if is_module_quantized(module):
                scales, zeros = _scales(module.weight.float(), scheme.weights)
                module.weight_scale.data.copy_(scales.reshape(module.weight_scale.shape))
                if hasattr(module, "weight_zero_point"):
                    module.weight_zero_point.data.copy_(zeros.reshape(module.weight_zero_point.shape))
                if hasattr(module, "input_scale"):
                    module.input_scale.data.fill_(0.05)
                module.quantization_status = "frozen"
        compressor: Any = ModelCompressor.from_pretrained_model(model)
        compressor.compress_model(model)
        model.save_pretrained(folder)
        compressor.update_config(str(folder))

    return write


def _scales(weight: torch.Tensor, arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    from compressed_tensors.quantization.utils import calculate_qparams

    strategy = str(getattr(arguments.strategy, "value", arguments.strategy))
    rows, columns = weight.shape
    height, width = {
        "tensor": (rows, columns),
        "channel": (1, columns),
        "group": (1, arguments.group_size or columns),
        "block": tuple(arguments.block_structure or (rows, columns)),
    }[strategy]
    blocks = weight.view(rows // height, height, columns // width, width)
    found: tuple[torch.Tensor, torch.Tensor] = calculate_qparams(blocks.amin((1, 3)), blocks.amax((1, 3)), arguments)
    return found


def _bitsandbytes(**settings: Any) -> Callable[[Path, Path], None]:
    def write(folder: Path, plain: Path) -> None:
        config = BitsAndBytesConfig(**settings)
        model = AutoModelForCausalLM.from_pretrained(
            plain, dtype=torch.bfloat16, quantization_config=config, device_map={"": "cpu"}
        )
        model.save_pretrained(folder)

    return write


def _fp8(block: list[int] | None) -> Callable[[Path, Path], None]:
    """By the operation of transformers, whose quantizer asks for a GPU."""

    def write(folder: Path, plain: Path) -> None:
        settings = SimpleNamespace(weight_block_size=block, scale_fmt="float")
        operation: Any = Fp8Quantize(SimpleNamespace(quantization_config=settings))
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in load_file(plain / "model.safetensors").items():
            tensors |= operation.convert({name: tensor}) if "_proj" in name else {name: tensor}
        if block is None:
            tensors = {name: part.squeeze() if "scale_inv" in name else part for name, part in tensors.items()}
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((plain / "config.json").read_text())
        config["quantization_config"] = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": block,
            "modules_to_not_convert": ["lm_head"],
        }
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    return write


WRITERS: dict[str, Callable[[Path, Path], None]] = {
    "awq": _awq,
    "bitsandbytes-fp4": _bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="fp4", bnb_4bit_compute_dtype="bfloat16"),
    "bitsandbytes-int8": _bitsandbytes(load_in_8bit=True),
    "bitsandbytes-nf4": _bitsandbytes(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype="bfloat16",
    ),
    "compressed-fp8": _compressed("FP8"),
    "compressed-fp8-block": _compressed("FP8_BLOCK", block_structure=_BLOCK),
    "compressed-fp8-dynamic": _compressed("FP8_DYNAMIC"),
    "compressed-w4a16": _compressed("W4A16", group_size=_GROUP),
    "compressed-w4a16-asymmetric": _compressed("W4A16_ASYM", group_size=_GROUP),
    "compressed-w8a16": _compressed("W8A16", group_size=_GROUP),
    "compressed-w8a8": _compressed("W8A8"),
    "fp8-block": _fp8(_BLOCK),
    "fp8-experts": _fp8(_BLOCK),
    "fp8-tensor": _fp8(None),
    "gptq": _gptq,
    "gptq-by-activation": _gptq_by_activation,
}


def _expected(folder: Path) -> dict[str, Any]:
    """What transformers generates, computed in float32 so that it does not depend on the CPU.

    ``native``: as the checkpoint is stored, where transformers computes that in float32. ``dequantized``: from the
    weights that the scheme's library computes, in the dtype ``weights_dtype``.
    """
    found: dict[str, Any] = {}
    try:
        stored = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        if stored.dtype is torch.float32:
            found["native"] = _generate(stored)
    except RuntimeError:  # FP8, and asymmetric schemes of compressed-tensors
        pass
    if folder.name.startswith("compressed"):
        plain, dtype = _decompressed(folder, torch.float32), "float32"
    elif "native" in found:  # nothing but weights is quantized
        return {**found, "dequantized": found["native"], "weights_dtype": "float32"}
    else:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        plain, dtype = (model.dequantize() if folder.name.startswith("bits") else model).float(), "bfloat16"
    return {**found, "dequantized": _generate(plain), "weights_dtype": dtype}


def _decompressed(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """A plain model with the weights that compressed-tensors computes."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    config = AutoConfig.from_pretrained(folder)
    settings = config.quantization_config
    settings = settings if isinstance(settings, dict) else settings.to_dict()
    group = (settings.get("config_groups") or settings["quantization_config"]["config_groups"])["group_0"]
    scheme = QuantizationScheme.model_validate(group)
    compressor: Any = BaseCompressor.get_value_from_registry(group["format"])
    tensors = load_file(folder / "model.safetensors")
    for scale in [name for name in tensors if name.endswith(".weight_scale")]:
        module = scale.removesuffix(".weight_scale")
        parts = {name: tensors.pop(name) for name in list(tensors) if name.startswith(f"{module}.")}
        state = {name.removeprefix(f"{module}."): part for name, part in parts.items()}
        state["weight_scale"] = state["weight_scale"].to(dtype)
        tensors[f"{module}.weight"] = compressor.decompress(state, scheme)["weight"].to(dtype)
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.load_state_dict(tensors)
    return model


def _generate(model: Any) -> list[int]:
    output = model.generate(
        torch.tensor([PROMPT]), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=2
    )
    tokens: list[int] = output[0, len(PROMPT) :].tolist()
    return tokens


def main() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    expected = {}
    with tempfile.TemporaryDirectory() as work, contextlib.chdir(work):  # gptqmodel writes logs where it runs
        for name, write in WRITERS.items():
            plain = Path(work) / f"{name}-plain"
            _plain_model(name).save_pretrained(plain)
            written = Path(work) / name
            write(written, plain)
            (FOLDER / name).mkdir()
            for file in ("config.json", "model.safetensors"):
                shutil.copy(written / file, FOLDER / name / file)
            expected[name] = _expected(FOLDER / name)
    (FOLDER / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
