"""A GGUF file becomes a plain folder: same weights, no quantization, digits split as the model was trained."""

import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from baton.core.errors import UnsupportedModelError
from baton.engine.models.gguf_convert import convert_gguf
from tests.tiny_gguf import HEAD_DIM, HEADS, HIDDEN, write_gguf


@pytest.fixture
def converted(tmp_path):
    tensors = write_gguf(tmp_path / "tiny.gguf", "smollm")
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "folder", torch.float32)
    return tmp_path / "folder", tensors


def test_the_weights_match_the_file(converted):
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


def test_the_config_does_not_mention_quantization_or_its_source(converted):
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
def test_numbers_are_split_as_specified_in_the_file(tmp_path, pre, expected):
    write_gguf(tmp_path / "tiny.gguf", pre)
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "folder")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "folder")
    tokens = tokenizer.encode("2020")
    assert tokenizer.convert_ids_to_tokens(tokens) == expected
    assert tokenizer.decode(tokens) == "2020"


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (GGMLQuantizationType.F32, torch.float32),
        (GGMLQuantizationType.F16, torch.float16),
        (GGMLQuantizationType.BF16, torch.bfloat16),
        (GGMLQuantizationType.Q8_0, torch.bfloat16),
    ],
)
def test_the_folder_keeps_the_dtype_of_the_file(tmp_path, kind, dtype):
    tensors = write_gguf(tmp_path / "tiny.gguf", kind=kind)
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "folder")
    assert AutoConfig.from_pretrained(tmp_path / "folder").dtype == dtype
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "folder", dtype="auto")
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    weight = torch.from_numpy(tensors["blk.0.ffn_down.weight"])
    assert torch.allclose(model.model.layers[0].mlp.down_proj.weight.float(), weight, rtol=0.01, atol=0.03)


def test_missing_weights_are_not_invented(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", leave_out=["blk.0.ffn_up.weight"])
    with pytest.raises(UnsupportedModelError, match=r"tiny.gguf lacks 1 of .*layers.0.mlp.up_proj.weight"):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "folder")


def test_one_part_of_a_split_file_is_refused(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", num_parts=3)
    with pytest.raises(UnsupportedModelError, match="is one of 3 parts"):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "folder")


@pytest.mark.parametrize(
    ("architecture", "message"),
    [("nonsense", "architecture nonsense is not supported yet. It reads .*llama"), ("t5", "contains a t5 model")],
)
def test_formats_that_transformers_cannot_read_are_refused(tmp_path, architecture, message):
    write_gguf(tmp_path / "tiny.gguf", architecture=architecture)
    with pytest.raises(UnsupportedModelError, match=message):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "folder")
