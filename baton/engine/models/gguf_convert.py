"""Converts one GGUF file into a plain model folder (safetensors, config, tokenizer, chat template).

Run as a program, it refuses a file in one line, which :mod:`baton.engine.models.gguf_cache` shows to the user.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType, GGUFReader
from tokenizers import pre_tokenizers
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

from baton.core.errors import UnsupportedModelError
from baton.engine.models.gguf_cache import REFUSAL

# Pre-tokenizers that transformers leaves out when it rebuilds a byte-level BPE tokenizer from GGUF metadata, by the
# value of ``tokenizer.ggml.pre``. SmolLM splits every number into single digits first; without it "2024" gets tokens
# that are rare in the model's training data.
_SPLITS_BEFORE_BYTE_LEVEL: dict[str, pre_tokenizers.PreTokenizer] = {
    "smollm": pre_tokenizers.Digits(individual_digits=True),
}


_UNQUANTIZED_DTYPES = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
_NO_ARCHITECTURES = frozenset({"general", "tokenizer"})
"""Sections of GGUF metadata that transformers keeps in one table with the architectures."""


def convert_gguf(gguf_file: Path, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Writes a model folder that ``from_pretrained`` loads without GGUF support.

    Args:
        folder: created if missing; files of the same names in it are overwritten.
        dtype: dtype of the stored weights; ``None`` takes the file's own, or bfloat16 where it is quantized.
            Dequantization itself runs in float32.

    Raises:
        UnsupportedModelError: transformers does not read the architecture from GGUF, the file is a part of a split one,
            or it lacks weights.
    """
    reader = GGUFReader(str(gguf_file))
    _refuse_unsupported(gguf_file, reader)
    folder.mkdir(parents=True, exist_ok=True)
    _convert_weights(gguf_file, folder, dtype or _stored_dtype(reader))
    _convert_tokenizer(gguf_file, reader, folder)
    for file in folder.iterdir():
        file.chmod(0o644)  # safetensors writes files that only their owner may read, but caches are shared


def _refuse_unsupported(gguf_file: Path, reader: GGUFReader) -> None:
    num_parts = int(_metadata(reader, "split.count") or 1)
    if num_parts > 1:
        raise UnsupportedModelError(
            f"{gguf_file.name} is one of {num_parts} parts. Join them with `llama-gguf-split --merge` first."
        )
    try:
        config = AutoConfig.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name, local_files_only=True)
    except (ValueError, NotImplementedError) as error:
        known = sorted(set(GGUF_SUPPORTED_ARCHITECTURES) - _NO_ARCHITECTURES)
        raise UnsupportedModelError(
            f"transformers cannot read {gguf_file.name}: {error} It reads the architectures {', '.join(known)}. "
            "Use the model's hub id or its safetensors folder instead."
        ) from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModelError(
            f"{gguf_file.name} contains a {config.model_type} model, which is not a decoder-only language model."
        )


def _stored_dtype(reader: GGUFReader) -> torch.dtype:
    """The dtype of most of the file's bytes."""
    sizes: dict[torch.dtype, int] = {}
    for tensor in reader.tensors:
        dtype = _UNQUANTIZED_DTYPES.get(tensor.tensor_type, torch.bfloat16)
        sizes[dtype] = sizes.get(dtype, 0) + int(tensor.n_bytes)
    return max(sizes, key=lambda dtype: sizes[dtype], default=torch.bfloat16)


def _convert_weights(gguf_file: Path, folder: Path, dtype: torch.dtype) -> None:
    auto_model: Any = AutoModelForCausalLM
    packed, loading = auto_model.from_pretrained(
        gguf_file.parent,
        gguf_file=gguf_file.name,
        dtype=torch.float32,
        local_files_only=True,
        output_loading_info=True,
    )
    if loading["missing_keys"]:  # transformers would continue with random numbers in their place
        missing = sorted(loading["missing_keys"])
        raise UnsupportedModelError(
            f"{gguf_file.name} lacks {len(missing)} of the model's weights, or transformers does not know their names:"
            f" {', '.join(missing[:3])}{', …' if len(missing) > 3 else ''}."
        )
    # transformers refuses to save a model that was loaded quantized, so the weights move into a plain one.
    config = copy.deepcopy(packed.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = dtype
    config.architectures = [type(packed).__name__]
    for leftover in ("_model_name_or_path", "unk_token_id"):  # copied from GGUF metadata, never read
        if hasattr(config, leftover):
            delattr(config, leftover)
    if isinstance(getattr(config, "rms_norm_eps", None), float):
        # GGUF stores float32: 1e-5 comes back as 9.99999975e-06.
        config.rms_norm_eps = float(f"{config.rms_norm_eps:.6g}")
    plain = auto_model.from_config(config, dtype=dtype)
    plain.load_state_dict(packed.state_dict(), strict=True)
    plain.generation_config = copy.deepcopy(packed.generation_config)
    plain.save_pretrained(folder)


def _convert_tokenizer(gguf_file: Path, reader: GGUFReader, folder: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name, local_files_only=True)
    split = _SPLITS_BEFORE_BYTE_LEVEL.get(str(_metadata(reader, "tokenizer.ggml.pre")))
    if split is not None:
        backend = tokenizer.backend_tokenizer
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, backend.pre_tokenizer])
    context_length = _metadata(reader, f"{_metadata(reader, 'general.architecture')}.context_length")
    if context_length is not None:
        tokenizer.model_max_length = int(context_length)
    for load_option in ("is_local", "local_files_only", "gguf_file"):
        tokenizer.init_kwargs.pop(load_option, None)
    tokenizer.save_pretrained(folder)


def _metadata(reader: GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    return None if field is None else field.contents()


def _main() -> None:
    """Runs ``python -m baton.engine.models.gguf_convert FILE.gguf FOLDER``."""
    if len(sys.argv) != 3:
        raise SystemExit("usage: python -m baton.engine.models.gguf_convert FILE.gguf FOLDER")
    try:
        convert_gguf(Path(sys.argv[1]), Path(sys.argv[2]))
    except UnsupportedModelError as error:
        raise SystemExit(f"{REFUSAL}{error.message}") from error


if __name__ == "__main__":
    _main()
