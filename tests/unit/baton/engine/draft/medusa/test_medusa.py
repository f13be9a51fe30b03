"""Medusa heads: their formula, both formats, and the errors for unsupported heads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.core.errors import BatonError, ConfigError, UnsupportedModelError
from baton.engine.draft.medusa.heads import MedusaHeads, load_medusa
from tests.tiny_drafts import HIDDEN, VOCAB, TinyDraft, tiny_eagle3, tiny_medusa_v1, tiny_medusa_vllm, tiny_target

CPU = torch.device("cpu")
TRUNCATED = 40


def load(draft: TinyDraft, folder: Path, name: str = "medusa_lm_head.pt", target: Any = None) -> MedusaHeads:
    return load_medusa(draft.write(folder, name), target or tiny_target(), torch.float32, CPU)


def hidden_states() -> torch.Tensor:
    return torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(0))


def truncated(ids: torch.Tensor, *, whole_lm_heads: bool) -> TinyDraft:
    draft = tiny_medusa_vllm()
    draft.config["truncated_vocab_size"] = len(ids)
    for name in [name for name in draft.tensors if name.startswith("lm_heads.")]:
        draft.tensors[name] = draft.tensors[name] if whole_lm_heads else draft.tensors[name][ids]
    draft.tensors["token_map"] = ids
    return draft


def some_ids() -> torch.Tensor:
    return torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[:TRUNCATED]


def test_a_head_is_its_lm_head_over_residual_blocks(tmp_path: Path) -> None:
    draft, hidden = tiny_medusa_v1(), hidden_states()
    heads = load(draft, tmp_path)
    assert heads.num_heads == 3  # the config says two
    logits = heads(hidden)
    assert logits.shape == (3, 4, VOCAB)
    for head in range(3):
        state = hidden.double()
        for block in range(2):
            weight = draft.tensors[f"{head}.{block}.linear.weight"].double()
            inner = state @ weight.T + draft.tensors[f"{head}.{block}.linear.bias"].double()
            state = state + inner / (1 + torch.exp(-inner))
        expected = state @ draft.tensors[f"{head}.2.weight"].double().T
        torch.testing.assert_close(logits[head].double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
def test_both_formats_give_the_same_heads(prefix: str, tmp_path: Path) -> None:
    first = load(tiny_medusa_v1(), tmp_path / "v1")
    second = load(tiny_medusa_vllm(prefix=prefix), tmp_path / "vllm", "model.safetensors")
    assert torch.equal(first(hidden_states()), second(hidden_states()))
    assert first.fingerprint() == second.fingerprint()
    assert first.fingerprint() != load(tiny_medusa_v1(seed=6), tmp_path / "other").fingerprint()


def test_heads_load_without_a_config_when_tensors_suffice(tmp_path: Path) -> None:
    folder = tiny_medusa_v1().write(tmp_path, "medusa_lm_head.pt")
    (folder / "config.json").unlink()
    assert load_medusa(folder, tiny_target(), torch.float32, CPU).num_heads == 3


@pytest.mark.parametrize("whole_lm_heads", [True, False])
def test_a_truncated_vocabulary_is_mapped_back(whole_lm_heads: bool, tmp_path: Path) -> None:
    ids, hidden = some_ids(), hidden_states()
    full = load(tiny_medusa_v1(), tmp_path / "full")(hidden)
    heads = load(truncated(ids, whole_lm_heads=whole_lm_heads), tmp_path / "truncated", "model.safetensors")
    assert heads.draft_vocab_size == TRUNCATED
    torch.testing.assert_close(heads(hidden), full[..., ids])
    assert torch.equal(heads.to_target_ids(torch.arange(TRUNCATED)), ids)


def test_a_token_map_without_truncation_is_ignored(tmp_path: Path) -> None:
    draft = tiny_medusa_vllm()
    draft.tensors["token_map"] = torch.arange(VOCAB).flip(0)
    heads = load(draft, tmp_path, "model.safetensors")
    assert torch.equal(heads.to_target_ids(torch.arange(VOCAB)), torch.arange(VOCAB))


@pytest.mark.parametrize("stored", [None, "lm_head.weight", "lm_heads.0.weight"])
def test_heads_can_share_one_lm_head(stored: str | None, tmp_path: Path) -> None:
    draft, target = tiny_medusa_vllm(), tiny_target()
    own = draft.tensors["lm_heads.0.weight"]
    draft.tensors = {name: t for name, t in draft.tensors.items() if not name.startswith("lm_heads.")}
    draft.config["original_lm_head"] = True
    if stored is not None:
        draft.tensors[stored] = own
    heads = load(draft, tmp_path, "model.safetensors", target)
    weight = target.lm_head.weight if stored is None else own
    logits = heads(hidden_states())
    for index, block in enumerate(heads.blocks):
        torch.testing.assert_close(logits[index], block(hidden_states()) @ weight.T)
    assert len({id(p) for p in heads.parameters()} & {id(p) for p in target.parameters()}) == 0


def _broken(change: str) -> TinyDraft:
    draft = tiny_medusa_v1()
    if change == "missing":
        del draft.tensors["1.0.linear.bias"]
    elif change == "gap":
        draft.tensors = {name: t for name, t in draft.tensors.items() if not name.startswith("1.")}
    elif change == "unexpected":
        draft.tensors["extra"] = torch.zeros(1)
    elif change == "shape":
        draft.tensors["2.2.weight"] = torch.zeros(VOCAB, HIDDEN + 1)
    return draft


def _mapped(ids: torch.Tensor | None) -> TinyDraft:
    draft = truncated(some_ids(), whole_lm_heads=False)
    if ids is None:
        del draft.tensors["token_map"]
    else:
        draft.tensors["token_map"] = ids
    return draft


REFUSED: dict[str, tuple[TinyDraft, type[BatonError], str]] = {
    "missing": (_broken("missing"), UnsupportedModelError, r"missing: 1\.0\.linear\.bias\."),
    "gap": (_broken("gap"), UnsupportedModelError, r"missing: 1\.\d.*unexpected: 2\."),
    "unexpected": (_broken("unexpected"), UnsupportedModelError, "unexpected: extra"),
    "shape": (_broken("shape"), UnsupportedModelError, r"wrong shapes: 2\.2\.weight is"),
    "other kind": (tiny_eagle3(), UnsupportedModelError, "no Medusa heads"),
    "no map": (_mapped(None), UnsupportedModelError, "token_map is missing"),
    "short map": (_mapped(some_ids()[:-1]), UnsupportedModelError, "token_map has the shape"),
    "repeating map": (_mapped(torch.zeros(TRUNCATED).long()), UnsupportedModelError, "different tokens"),
    "map beyond": (_mapped(some_ids() + VOCAB), UnsupportedModelError, "different tokens"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_heads_that_do_not_fit_are_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    draft, error, reason = REFUSED[name]
    with pytest.raises(error, match=reason):
        load(draft, tmp_path)


@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
@pytest.mark.parametrize(
    ("names", "make"),
    [
        (("1.0.linear.bias", "0.2.weight"), tiny_medusa_v1),
        (("blocks.1.layers.0.bias", "lm_heads.0.weight"), tiny_medusa_vllm),
    ],
    ids=["v1", "vllm"],
)
def test_errors_name_tensors_as_in_the_file(
    names: tuple[str, str], make: Callable[[], TinyDraft], prefix: str, tmp_path: Path
) -> None:
    missing, reshaped = (prefix + name for name in names)
    draft = make()
    draft.tensors = {prefix + name: tensor for name, tensor in draft.tensors.items()}
    del draft.tensors[missing]
    draft.tensors[reshaped] = torch.zeros(VOCAB, HIDDEN + 1)
    with pytest.raises(UnsupportedModelError) as caught:
        load(draft, tmp_path)
    assert f"missing: {missing}; wrong shapes: {reshaped} is [96, 33] instead of [96, 32]." in str(caught.value)


@pytest.mark.parametrize(
    ("target", "reason"),
    [({"hidden": 64}, "hidden size 32, but the target has 64"), ({"vocab": 100}, "of 96 tokens, expected 100")],
)
def test_heads_of_another_target_are_refused(target: dict[str, int], reason: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        load(tiny_medusa_v1(), tmp_path, target=tiny_target(**target))


def test_missing_weights_are_refused_with_the_names_of_medusa(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"medusa_lm_head\.pt"):
        load_medusa(tmp_path, tiny_target(), torch.float32, CPU)
