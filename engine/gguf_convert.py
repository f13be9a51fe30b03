"""Turn one GGUF file into a plain model folder (safetensors, config, tokenizer, chat template)."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

# Pre-tokenizers that transformers leaves out when it rebuilds a byte-level BPE tokenizer from GGUF metadata, by the
# value of ``tokenizer.ggml.pre``. SmolLM splits every number into single digits first; without it "2024" gets tokens
# that the model has hardly seen.
_SPLITS_BEFORE_BYTE_LEVEL: dict[str, pre_tokenizers.PreTokenizer] = {
    "smollm": pre_tokenizers.Digits(individual_digits=True),
}


def convert_gguf(gguf_file: Path, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Writes a model folder that ``from_pretrained`` loads without knowing of GGUF.

    Args:
        folder: created if missing; files of the same names in it are overwritten.
        dtype: of the stored weights; dequantization itself runs in float32.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _convert_weights(gguf_file, folder, dtype)
    _convert_tokenizer(gguf_file, folder)
    for file in folder.iterdir():
        file.chmod(0o644)  # safetensors writes files that only their owner may read; caches are shared


def _convert_weights(gguf_file: Path, folder: Path, dtype: torch.dtype) -> None:
    packed = AutoModelForCausalLM.from_pretrained(
        gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.float32, local_files_only=True
    )
    # transformers refuses to save a model that remembers being quantized, so the weights move into a plain one.
    config = copy.deepcopy(packed.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = dtype
    config.architectures = [type(packed).__name__]
    for leftover in ("_model_name_or_path", "unk_token_id"):  # copied from GGUF metadata, read by nobody
        if hasattr(config, leftover):
            delattr(config, leftover)
    if isinstance(getattr(config, "rms_norm_eps", None), float):
        # GGUF stores float32: 1e-5 comes back as 9.99999975e-06.
        config.rms_norm_eps = float(f"{config.rms_norm_eps:.6g}")
    auto_model: Any = AutoModelForCausalLM
    plain = auto_model.from_config(config, dtype=dtype)
    plain.load_state_dict(packed.state_dict(), strict=True)
    plain.generation_config = copy.deepcopy(packed.generation_config)
    plain.save_pretrained(folder)


def _convert_tokenizer(gguf_file: Path, folder: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name, local_files_only=True)
    reader = GGUFReader(str(gguf_file))
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
    """``python -m engine.gguf_convert FILE.gguf FOLDER``."""
    if len(sys.argv) != 3:
        raise SystemExit("usage: python -m engine.gguf_convert FILE.gguf FOLDER")
    convert_gguf(Path(sys.argv[1]), Path(sys.argv[2]))


if __name__ == "__main__":
    _main()
