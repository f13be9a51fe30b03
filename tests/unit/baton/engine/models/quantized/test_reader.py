"""Any part of a quantized weight is that part of the whole, and nothing quantized is taken for a plain tensor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig

from baton.core.errors import ConfigError, UnsupportedModelError
from baton.engine.models.quantized import reader
from baton.engine.models.quantized.formats import AwqFormat, GptqFormat, ScaledFormat, WeightFormat
from baton.engine.models.quantized.reader import PlainWeight, checkpoint_files, plain_tensors, plain_views
from baton.engine.models.quantized.schemes import Scheme, scheme_of
from tests.quantized.make_checkpoints import FOLDER

CPU = torch.device("cpu")
SCHEMES = sorted(path.name for path in FOLDER.iterdir() if path.is_dir())
PROJECTION = "model.layers.1.mlp.down_proj"


class Stored:
    """A tensor in memory, as a slice of a safetensors file."""

    def __init__(self, tensor: torch.Tensor, dtype: str = "I32") -> None:
        self._tensor, self._dtype = tensor, dtype

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        return self._dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._tensor[index]


def weight_of(weight_format: WeightFormat, stored: Mapping[str, Stored]) -> PlainWeight:
    return PlainWeight("layer.weight", stored, weight_format, torch.float32, CPU)


def bounds(size: int) -> st.SearchStrategy[slice]:
    ends = st.tuples(st.integers(0, size), st.integers(0, size))
    return ends.map(lambda pair: slice(min(pair), max(pair)))


@given(data=st.data(), name=st.sampled_from(SCHEMES), at_once=st.sampled_from([1, 100, 1 << 24]))
def test_a_part_of_a_weight_is_that_part_of_the_whole(data: st.DataObject, name: str, at_once: int) -> None:
    scheme = scheme_of(AutoConfig.from_pretrained(FOLDER / name))
    assert scheme is not None
    with pytest.MonkeyPatch.context() as patch, plain_tensors(FOLDER / name, scheme, torch.float32, CPU) as tensors:
        patch.setattr(reader, "_NUMBERS_AT_ONCE", at_once)
        weight = tensors[f"{PROJECTION}.weight" if name != "fp8-experts" else "model.layers.1.self_attn.o_proj.weight"]
        rows, columns = (data.draw(bounds(size)) for size in weight.get_shape())
        whole = weight[...]
        assert whole.shape == tuple(weight.get_shape())
        assert torch.equal(weight[rows, columns], whole[rows, columns])
        assert torch.equal(weight[rows], whole[rows])


def test_the_last_blocks_may_be_smaller() -> None:
    numbers = torch.arange(1, 16, dtype=torch.float32).view(3, 5).to(torch.float8_e4m3fn)
    scales = torch.tensor([[1.0, 10.0, 100.0], [2.0, 20.0, 200.0]])
    blocks = ScaledFormat("weight_scale_inv", ("F8_E4M3",), ((2, 2),))
    weight = weight_of(blocks, {"weight": Stored(numbers, "F8_E4M3"), "weight_scale_inv": Stored(scales, "F32")})
    factors = torch.tensor([[1, 1, 10, 10, 100], [1, 1, 10, 10, 100], [2, 2, 20, 20, 200]])
    assert torch.equal(weight[...], numbers.float() * factors)
    assert torch.equal(weight[1:3, 3:5], (numbers.float() * factors)[1:3, 3:5])


def test_zero_points_stored_less_one_do_not_disturb_their_neighbours() -> None:
    zeros = [0, 5, 0, 15, 8, 0, 1, 0]
    word = sum(zero << 4 * place for place, zero in enumerate(zeros)) - 0x11111111
    word = (word + (1 << 31)) % (1 << 32) - (1 << 31)
    stored = {
        "qweight": Stored(torch.zeros((1, 8), dtype=torch.int32)),
        "qzeros": Stored(torch.tensor([[word]], dtype=torch.int32)),
        "scales": Stored(torch.ones((1, 8), dtype=torch.float16), "F16"),
        "g_idx": Stored(torch.zeros(8, dtype=torch.int32)),
    }
    expected = -torch.tensor(zeros, dtype=torch.float32)[:, None].expand(8, 8)
    assert torch.equal(weight_of(GptqFormat(4, None, stores_less_one=True), stored)[...], expected)


def test_awq_interleaves_the_rows_of_a_word() -> None:
    word = sum(row << 4 * place for place, row in enumerate((0, 2, 4, 6, 1, 3, 5, 7)))
    stored = {
        "qweight": Stored(torch.tensor([[word], [word]], dtype=torch.int32)),
        "qzeros": Stored(torch.zeros((1, 1), dtype=torch.int32)),
        "scales": Stored(torch.full((1, 8), 0.5, dtype=torch.float16), "F16"),
    }
    expected = torch.arange(8)[:, None].expand(8, 2) * 0.5
    assert torch.equal(weight_of(AwqFormat(None), stored)[...], expected)


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({"weight": ((4, 4), "I8"), "scale": ((4, 1), "F32")}, r"layer.weight .* is I8; expected F8_E4M3"),
        ({"weight": ((4, 4), "F8_E4M3"), "scale": ((3, 1), "F32")}, r"scale has the shape \[3, 1\].* needs \[4, 1\]"),
        ({"weight": ((4, 4), "F8_E4M3"), "scale": ((0, 1), "F32")}, r"scale has the shape \[0, 1\].* needs \[4, 1\]"),
        ({"weight": ((4, 4), "F8_E4M3"), "scale": ((4, 1), "I64")}, r"scale is I64; expected F32 or F16 or BF16"),
        ({"weight": ((2, 4, 4), "F8_E4M3"), "scale": ((2, 1, 1), "F32")}, r"3 dimensions; only .* linear layers"),
    ],
)
def test_tensors_of_another_format_are_refused(stored: dict[str, Any], message: str) -> None:
    tensors = {name: Stored(torch.ones(shape), dtype) for name, (shape, dtype) in stored.items()}
    with pytest.raises(UnsupportedModelError, match=message):
        weight_of(ScaledFormat("scale", ("F8_E4M3",), ((1, None),)), tensors)


def test_quantized_tensors_that_the_scheme_does_not_describe_are_refused() -> None:
    scheme = Scheme("FP8", formats=(ScaledFormat("weight_scale_inv", ("F8_E4M3",), ((None, None),)),))
    stored = {"experts.gate_up_proj": Stored(torch.ones((2, 4, 4)), "F8_E4M3")}
    with pytest.raises(UnsupportedModelError, match=r"experts.gate_up_proj is F8_E4M3.*engine.weights: native"):
        plain_views(stored, scheme, torch.float32, CPU)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["weight_scale"], r"layer has weight_scale but lacks weight"),
        (["weight"], r"layer has weight but lacks weight_scale"),
    ],
)
def test_incomplete_weights_are_named(names: list[str], message: str) -> None:
    scheme = Scheme("FP8", formats=(ScaledFormat("weight_scale", ("F8_E4M3",), ((None, None),)),))
    stored = {f"layer.{name}": Stored(torch.ones((2, 2)), "F8_E4M3") for name in names}
    with pytest.raises(UnsupportedModelError, match=message):
        plain_views(stored, scheme, torch.float32, CPU)


def test_a_plain_weight_beside_a_quantized_one_is_refused() -> None:
    scheme = scheme_of(AutoConfig.from_pretrained(FOLDER / "gptq"))
    assert scheme is not None
    with (
        plain_tensors(FOLDER / "gptq", scheme, *ANY) as found,
        safe_open(FOLDER / "gptq/model.safetensors", framework="pt") as content,
    ):
        stored = {name: content.get_slice(name) for name in content.keys()}  # noqa: SIM118
        stored[f"{PROJECTION}.weight"] = Stored(torch.ones((2, 2)), "F32")
        assert f"{PROJECTION}.weight" in found
        with pytest.raises(UnsupportedModelError, match=r"down_proj.weight is there twice"):
            plain_views(stored, scheme, *ANY)


def test_scales_of_activations_and_kv_are_left_out() -> None:
    scheme = Scheme("FP8", formats=(ScaledFormat("weight_scale", ("F8_E4M3",), ((None, None),)),))
    stored = {
        "layer.weight": Stored(torch.ones((2, 2)), "F8_E4M3"),
        "layer.weight_scale": Stored(torch.ones(1), "F32"),
        "layer.input_scale": Stored(torch.ones(1), "F32"),
        "layer.k_scale": Stored(torch.ones(1), "F32"),
        "norm.weight": Stored(torch.ones(2), "BF16"),
    }
    assert sorted(plain_views(stored, scheme, torch.float32, CPU)) == ["layer.weight", "norm.weight"]


@pytest.mark.parametrize("index", [0, (slice(None), 1), slice(0, 4, 2), torch.tensor([1])])
def test_only_slices_can_be_read(index: Any) -> None:
    stored = {"weight": Stored(torch.ones((4, 4)), "F8_E4M3"), "scale": Stored(torch.ones(1), "F32")}
    with pytest.raises(TypeError, match="slices with a step of one"):
        weight_of(ScaledFormat("scale", ("F8_E4M3",), ((None, None),)), stored)[index]


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    save_file({"norm.weight": torch.ones(3)}, tmp_path / "consolidated.safetensors")
    with pytest.raises(ConfigError, match=r"there is no file .*model.safetensors\. Expected a checkpoint"):
        checkpoint_files(tmp_path)


def test_the_index_says_which_tensors_are_taken_from_which_file(tmp_path: Path) -> None:
    (tmp_path / reader.INDEX).write_text(
        '{"weight_map": {"a.weight": "two.safetensors", "b.weight": "one.safetensors"}}'
    )
    with pytest.raises(ConfigError, match=r"there is no file .*two.safetensors"):
        checkpoint_files(tmp_path)
    for number, file in enumerate(("one.safetensors", "two.safetensors")):
        tensors = {name: torch.full((1,), float(number)) for name in ("a.weight", "b.weight")}
        save_file(tensors, tmp_path / file)
    with plain_tensors(tmp_path, Scheme("x"), *ANY) as found:
        assert {name: found[name][...].item() for name in found} == {"a.weight": 1.0, "b.weight": 0.0}
    (tmp_path / reader.INDEX).write_text('{"weight_map": {"c.weight": "one.safetensors"}}')
    with (
        pytest.raises(ConfigError, match=r"one.safetensors lacks c.weight"),
        plain_tensors(tmp_path, Scheme("x"), *ANY),
    ):
        pass


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", "[" * 200_000, '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "../b"}}']
)
def test_a_broken_index_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / reader.INDEX).write_text(content)
    with pytest.raises(ConfigError, match=r"model.safetensors.index.json could not be read"):
        checkpoint_files(tmp_path)


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"garbage")
    with (
        pytest.raises(ConfigError, match=r"model.safetensors could not be read"),
        plain_tensors(tmp_path, Scheme("x"), *ANY),
    ):
        pass


def test_tensors_that_are_not_quantized_are_the_stored_ones(tmp_path: Path) -> None:
    save_file({"norm.weight": torch.ones(3, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    with (
        plain_tensors(tmp_path, Scheme("x"), *ANY) as tensors,
        safe_open(tmp_path / "model.safetensors", framework="pt") as stored,
    ):
        assert torch.equal(tensors["norm.weight"][...], stored.get_tensor("norm.weight"))


ANY = (torch.float32, CPU)
