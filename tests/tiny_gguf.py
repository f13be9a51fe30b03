"""A GGUF file of a few kilobytes, for tests of its conversion."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from tokenizers import pre_tokenizers

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER = 32, 2, 1, 16, 64
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def write_gguf(
    path: Path,
    pre: str = "smollm",
    *,
    architecture: str = "llama",
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    leave_out: Collection[str] = (),
    num_parts: int = 1,
) -> dict[str, np.ndarray]:
    """Writes one random Llama layer with a byte-level vocabulary; returns the tensors by their GGUF names.

    Args:
        kind: type of the matrices; norms stay float32.
        leave_out: tensors to omit.
        num_parts: number of files of which this one claims to be the first.
    """
    tokens = SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet()) + ["20"]
    random = np.random.default_rng(0)
    shapes = {
        "token_embd.weight": (len(tokens), HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        "blk.0.attn_q.weight": (HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
        "blk.0.ffn_gate.weight": (INNER, HIDDEN),
        "blk.0.ffn_up.weight": (INNER, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, INNER),
    }
    tensors = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("Tiny")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(tokens) - 3))
    writer.add_token_merges(["2 0"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if num_parts > 1:
        writer.add_uint16("split.count", num_parts)
    for name, tensor in tensors.items():
        if name in leave_out:
            continue
        if tensor.ndim == 1 or kind == GGMLQuantizationType.F32:
            writer.add_tensor(name, tensor)
        else:
            writer.add_tensor(name, quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors
