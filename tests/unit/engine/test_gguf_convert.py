"""A GGUF file becomes a plain folder: same weights, no quantization, digits split as the model was trained."""

import gguf
import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from engine.gguf_convert import convert_gguf

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER = 32, 2, 1, 16, 64
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def write_gguf(path, pre: str) -> dict[str, np.ndarray]:
    """One random Llama layer with a byte-level vocabulary; gives the tensors by their GGUF names."""
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
    writer = gguf.GGUFWriter(path, "llama")
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
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


@pytest.fixture
def converted(tmp_path):
    tensors = write_gguf(tmp_path / "tiny.gguf", "smollm")
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "folder", torch.float32)
    return tmp_path / "folder", tensors


def test_the_weights_are_those_of_the_file(converted):
    folder, tensors = converted
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    layer = model.model.layers[0]
    pairs = [
        (model.model.embed_tokens.weight, "token_embd.weight"),
        (layer.self_attn.v_proj.weight, "blk.0.attn_v.weight"),
        (layer.self_attn.o_proj.weight, "blk.0.attn_output.weight"),
        (layer.mlp.down_proj.weight, "blk.0.ffn_down.weight"),
    ]
    for weight, name in pairs:
        assert torch.equal(weight, torch.from_numpy(tensors[name])), name
    # GGUF interleaves the two halves of every rotary pair; transformers keeps the halves apart.
    interleaved = torch.from_numpy(tensors["blk.0.attn_q.weight"])
    halves = interleaved.reshape(HEADS, HEAD_DIM // 2, 2, HIDDEN).transpose(1, 2).reshape(HEADS * HEAD_DIM, HIDDEN)
    assert torch.equal(layer.self_attn.q_proj.weight, halves)


def test_the_config_knows_nothing_of_quantization_or_of_where_it_came_from(converted):
    folder, _ = converted
    config = AutoConfig.from_pretrained(folder)
    text = (folder / "config.json").read_text()
    assert "quantization" not in text
    assert "gguf" not in text.lower()
    assert str(folder.parent) not in text + (folder / "tokenizer_config.json").read_text()
    assert config.architectures == ["LlamaForCausalLM"]
    assert config.rms_norm_eps == 1e-5
    assert AutoTokenizer.from_pretrained(folder).model_max_length == 128


@pytest.mark.parametrize(("pre", "expected"), [("smollm", ["2", "0", "2", "0"]), ("gpt-2", ["20", "20"])])
def test_numbers_are_split_as_the_file_says(tmp_path, pre, expected):
    write_gguf(tmp_path / "tiny.gguf", pre)
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "folder")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "folder")
    tokens = tokenizer.encode("2020")
    assert tokenizer.convert_ids_to_tokens(tokens) == expected
    assert tokenizer.decode(tokens) == "2020"
