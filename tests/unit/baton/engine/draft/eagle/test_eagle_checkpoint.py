"""Loading and saving EAGLE heads: layer ids and flags of each format, and the errors for unsupported heads."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.core.errors import BatonError, ConfigError, UnsupportedModelError
from baton.engine.draft.eagle.eagle_checkpoint import load_eagle, save_eagle3
from baton.engine.draft.eagle.eagle_layout import default_feature_layers
from baton.engine.draft.eagle.head import EagleHead
from tests.tiny_drafts import (
    DRAFT_VOCAB,
    HIDDEN,
    VOCAB,
    TinyDraft,
    tiny_eagle,
    tiny_eagle3,
    tiny_medusa_v1,
    tiny_medusa_vllm,
    tiny_narrow_eagle3,
    tiny_speculators,
    tiny_target,
)

CPU = torch.device("cpu")
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


def load(folder: Path, target: Any = None) -> EagleHead:
    return load_eagle(folder, target or tiny_target(), torch.float32, CPU)


def outputs(head: EagleHead) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(5, HIDDEN * len(head.feature_layers), generator=generator)
    tokens = torch.randint(VOCAB, (5,), generator=generator)
    _, hidden = head(tokens, head.fuse(features), torch.arange(5))
    return head.logits(hidden)


@pytest.mark.parametrize(
    ("draft", "layers"),
    [
        (tiny_eagle3(), (2, 4, 5)),
        (tiny_speculators(), (2, 4, 5)),
        (tiny_speculators(**{LAYER_IDS: [1, 3, 8]}), (1, 3, 8)),
        (tiny_eagle3(**{LAYER_IDS: [1, 3, 4]}), (1, 3, 4)),
        (tiny_eagle3(eagle_config={LAYER_IDS: [1, 3, 4]}), (2, 4, 5)),
        (tiny_eagle3(**{LAYER_IDS: [2, 4, 5]}, eagle_config={LAYER_IDS: [1, 3, 4]}), (2, 4, 5)),
        (tiny_eagle3(eagle_config={LAYER_IDS: [1, 3, 8]}), (1, 3, 8)),  # no ninth layer: these can only be inputs
    ],
    ids=["usual", "usual speculators", "top", "top flat", "nested outputs", "both", "nested inputs"],
)
def test_layer_ids_become_indices_of_hidden_states(draft: TinyDraft, layers: tuple[int, ...], tmp_path: Path) -> None:
    assert load(draft.write(tmp_path)).feature_layers == layers


def test_the_default_layers_of_a_30_layer_model() -> None:
    assert default_feature_layers(30) == (2, 15, 27)


@pytest.mark.parametrize(
    ("draft", "expected"),
    [
        (tiny_eagle3(), {"norm_before_residual": False, "norm_output": False}),
        (tiny_speculators(), {"norm_before_residual": True, "norm_output": False}),
        (tiny_speculators(norm_before_residual=False), {"norm_before_residual": False}),
        (tiny_eagle3(norm_output=True, eagle_config={"norm_output": False}), {"norm_output": False}),
    ],
    ids=["flat", "speculators", "stated", "nested first"],
)
def test_missing_flags_have_the_defaults_of_the_format(
    draft: TinyDraft, expected: dict[str, bool], tmp_path: Path
) -> None:
    settings = load(draft.write(tmp_path)).settings
    assert {name: getattr(settings, name) for name in expected} == expected


def test_a_partial_config_gets_the_defaults_of_its_class(tmp_path: Path) -> None:
    """speculators leaves out what equals the defaults of transformers' config class."""
    draft = tiny_speculators()
    del draft.config["transformer_layer_config"]["rope_theta"]
    del draft.config["transformer_layer_config"]["hidden_act"]
    head = load(draft.write(tmp_path / "short"))
    assert torch.equal(outputs(head), outputs(load(tiny_speculators().write(tmp_path / "full"))))


def test_a_stored_embedding_takes_precedence_over_the_targets(tmp_path: Path) -> None:
    draft, target = tiny_eagle3(), tiny_target()
    shared = outputs(load(draft.write(tmp_path / "shared"), target))
    draft.tensors["embed_tokens.weight"] = target.model.embed_tokens.weight.clone()
    assert torch.equal(outputs(load(draft.write(tmp_path / "same"), target)), shared)
    draft.tensors["embed_tokens.weight"] *= 2
    assert not torch.equal(outputs(load(draft.write(tmp_path / "own"), target)), shared)


@pytest.mark.parametrize("stated", [None, VOCAB])
def test_without_an_lm_head_the_targets_lm_head_is_used(stated: int | None, tmp_path: Path) -> None:
    draft, target = tiny_eagle3(draft_vocab_size=stated), tiny_target()
    for name in ("lm_head.weight", "d2t", "t2d"):
        del draft.tensors[name]
    head = load(draft.write(tmp_path), target)
    assert head.draft_vocab_size == VOCAB
    hidden = torch.randn(3, HIDDEN)
    assert torch.equal(head.logits(hidden), target.lm_head(hidden))
    assert torch.equal(head.to_target_ids(torch.arange(VOCAB)), torch.arange(VOCAB))


def test_a_full_vocabulary_has_no_mapping(tmp_path: Path) -> None:
    draft = tiny_eagle3(draft_vocab_size=VOCAB)
    draft.tensors["lm_head.weight"] = torch.randn(VOCAB, HIDDEN)
    draft.tensors["d2t"] = torch.zeros(VOCAB, dtype=torch.int64)
    draft.tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool)  # as SafeAILab leaves it when nothing is mapped
    head = load(draft.write(tmp_path))
    assert torch.equal(head.to_target_ids(torch.arange(VOCAB)), torch.arange(VOCAB))


def _sharded(draft: TinyDraft, folder: Path) -> Path:
    draft.write(folder)
    (folder / "model.safetensors").unlink()
    names = sorted(draft.tensors)
    files = {name: f"part-{index % 2}.safetensors" for index, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: draft.tensors[name] for name in names if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return folder


def _prefixed(draft: TinyDraft, folder: Path) -> Path:
    tensors = {f"model.{name}" if name != "lm_head.weight" else name: t for name, t in draft.tensors.items()}
    return TinyDraft(draft.config, tensors).write(folder)


@pytest.mark.parametrize(
    "write",
    [lambda d, f: d.write(f, "pytorch_model.bin"), _sharded, _prefixed],
    ids=["pytorch_model.bin", "sharded", "prefixed"],
)
def test_every_storage_format_gives_the_same_head(write: Callable[[TinyDraft, Path], Path], tmp_path: Path) -> None:
    plain = load(tiny_eagle3().write(tmp_path / "plain"))
    other = load(write(tiny_eagle3(), tmp_path / "other"))
    assert torch.equal(outputs(plain), outputs(other))
    assert plain.fingerprint() == other.fingerprint()


def test_fingerprints_depend_on_weights_flags_and_layers(tmp_path: Path) -> None:
    changed = tiny_eagle3()
    changed.tensors["midlayer.mlp.up_proj.weight"][7, 9] += 1e-3
    drafts = [
        tiny_eagle3(),
        changed,
        tiny_eagle3(seed=8),
        tiny_eagle3(norm_output=True),
        tiny_eagle3(**{LAYER_IDS: [1, 3, 4]}),
        tiny_eagle(),
    ]
    heads = [load(draft.write(tmp_path / str(index))) for index, draft in enumerate(drafts)]
    assert len({head.fingerprint() for head in heads}) == len(drafts)
    assert heads[0].fingerprint() == load(tmp_path / "0").fingerprint()
    assert heads[0].fingerprint() != heads[1].fingerprint()


SAVED: dict[str, TinyDraft] = {
    "eagle3": tiny_eagle3(),
    "3.1": tiny_eagle3(fc_norm=True, norm_output=True),
    "norm before fc": tiny_eagle3(norm_before_fc=True, norm_before_residual=True),
    "other layers": tiny_eagle3(eagle_config={LAYER_IDS: [0, 3, 6]}),
    "two features": tiny_eagle3(num_features=2, **{LAYER_IDS: [1, 4]}),
    "narrow": tiny_narrow_eagle3(),
    "rope": tiny_eagle3(rope_scaling={"rope_type": "linear", "factor": 2.0}),
    "speculators": tiny_speculators(),
    "speculators of two layers": tiny_speculators(
        num_layers=2, layer={"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}
    ),
}


@pytest.mark.parametrize("name", SAVED)
def test_a_saved_head_loads_as_the_same_head(name: str, tmp_path: Path) -> None:
    head = load(SAVED[name].write(tmp_path / "before"))
    save_eagle3(head, tmp_path / "after", "owner/target")
    again = load(tmp_path / "after")
    assert again.settings == head.settings
    assert again.fingerprint() == head.fingerprint()
    assert again.feature_layer_choices == head.feature_layer_choices[:1]
    assert torch.equal(outputs(again), outputs(head))


def test_heads_are_saved_in_the_common_format(tmp_path: Path) -> None:
    draft = tiny_eagle3(**{LAYER_IDS: [1, 3, 6]})
    save_eagle3(load(draft.write(tmp_path / "before")), tmp_path / "after", "owner/target")
    stored = load_file(tmp_path / "after" / "model.safetensors")
    assert stored.keys() == draft.tensors.keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in draft.tensors.items())
    config = json.loads((tmp_path / "after" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (config["draft_vocab_size"], config["vocab_size"]) == (DRAFT_VOCAB, VOCAB)
    assert config[LAYER_IDS] == [1, 3, 6]  # vLLM: inputs
    assert config["eagle_config"][LAYER_IDS] == [0, 2, 5]  # SGLang: outputs


@pytest.mark.parametrize("draft", [tiny_eagle(), tiny_speculators(kind="qwen3")], ids=["eagle", "qwen3"])
def test_heads_that_the_common_format_cannot_represent_are_not_saved(draft: TinyDraft, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="common format"):
        save_eagle3(load(draft.write(tmp_path / "before")), tmp_path / "after", "owner/target")


def _without(draft: TinyDraft, *names: str) -> TinyDraft:
    return TinyDraft(draft.config, {name: t for name, t in draft.tensors.items() if name not in names})


def _with(draft: TinyDraft, **tensors: torch.Tensor) -> TinyDraft:
    return TinyDraft(draft.config, {**draft.tensors, **{n.replace("__", "."): t for n, t in tensors.items()}})


NOT_A_NUMBER = torch.full((HIDDEN,), float("nan"))
REPEATED = torch.zeros(DRAFT_VOCAB, dtype=torch.int64) - torch.arange(DRAFT_VOCAB)
REFUSED: dict[str, tuple[TinyDraft, type[BatonError], str]] = {
    "p-eagle": (tiny_speculators(speculators_model_type="peagle"), UnsupportedModelError, "P-EAGLE"),
    "p-eagle by tensor": (_with(tiny_eagle3(), mask_hidden=torch.zeros(96)), UnsupportedModelError, "P-EAGLE"),
    "mtp deepseek": (tiny_eagle3(num_nextn_predict_layers=1), UnsupportedModelError, "MTP"),
    "mtp qwen": (TinyDraft({}, {"mtp.fc.weight": torch.zeros(2, 2)}), UnsupportedModelError, "MTP"),
    "other speculators": (tiny_speculators(speculators_model_type="dflash"), UnsupportedModelError, "'dflash'"),
    "medusa": (tiny_medusa_v1(), UnsupportedModelError, "Medusa"),
    "medusa of vllm": (tiny_medusa_vllm(), UnsupportedModelError, "Medusa"),
    "no format": (TinyDraft({}, {"x": torch.zeros(1)}), UnsupportedModelError, "not in a known format"),
    "other vocabulary": (tiny_eagle3(vocab_size=97), UnsupportedModelError, "97 tokens, but the target has 96"),
    "other target": (tiny_eagle3(target_hidden_size=64), UnsupportedModelError, "64, but the target has 32"),
    "too deep": (tiny_eagle3(**{LAYER_IDS: [2, 4, 9]}), UnsupportedModelError, r"\[2, 4, 9\].*8 layers"),
    "features": (
        tiny_eagle3(num_features=2, **{LAYER_IDS: [1, 3, 4]}),
        UnsupportedModelError,
        "2 features .* names 3 layers",
    ),
    "missing tensor": (_without(tiny_eagle3(), "norm.weight"), UnsupportedModelError, "missing: norm.weight"),
    "missing mapping": (_without(tiny_eagle3(), "d2t"), UnsupportedModelError, "missing: d2t"),
    "missing lm_head": (_without(tiny_eagle3(), "lm_head.weight"), UnsupportedModelError, "missing: lm_head.weight"),
    "missing bias": (_without(tiny_eagle(), "fc.bias"), UnsupportedModelError, "missing: fc.bias"),
    "missing norms": (_without(tiny_eagle3(fc_norm=True), "fc_norm.1.weight"), UnsupportedModelError, "fc_norm.1"),
    "norm without flag": (
        _with(tiny_eagle3(), input_norm__weight=torch.ones(96)),
        UnsupportedModelError,
        "unexpected: input_norm.weight",
    ),
    "fewer layers": (
        tiny_speculators(num_layers=2, layer={"num_hidden_layers": 1}),
        UnsupportedModelError,
        "of 1 layers according to its config.json, but has tensors of 2",
    ),
    "more layers": (tiny_eagle(num_hidden_layers=2), UnsupportedModelError, "of 2 layers .* tensors of 1"),
    "shape": (tiny_eagle3(intermediate_size=49), UnsupportedModelError, r"wrong shapes: .*mlp.* instead of"),
    "lm_head rows": (tiny_eagle3(draft_vocab_size=41), UnsupportedModelError, "40 rows, but its config has 41"),
    "vocabulary too large": (tiny_eagle3(draft_vocab_size=VOCAB + 1), ConfigError, "draft_vocab_size is 97"),
    "d2t leaves the vocabulary": (
        _with(tiny_eagle3(), d2t=torch.full((DRAFT_VOCAB,), 60)),
        UnsupportedModelError,
        "outside the target's vocabulary",
    ),
    "d2t repeats": (_with(tiny_eagle3(), d2t=REPEATED), UnsupportedModelError, "several draft ids to one"),
    "d2t against t2d": (
        _with(tiny_eagle3(), d2t=torch.zeros(DRAFT_VOCAB, dtype=torch.int64)),
        UnsupportedModelError,
        "d2t and t2d",
    ),
    "not numbers": (_with(tiny_eagle3(), norm__weight=NOT_A_NUMBER), ConfigError, "norm.weight .* not finite"),
    "ids for numbers": (
        _with(tiny_eagle3(), norm__weight=torch.ones(HIDDEN, dtype=torch.int64)),
        UnsupportedModelError,
        r"norm.weight is torch\.int64",
    ),
    "heads": (
        tiny_eagle3(num_attention_heads=8),
        UnsupportedModelError,
        r"midlayer\.self_attn\.q_proj.* \[64, 64\], expected 128 rows",
    ),
    "unknown activation": (tiny_eagle3(hidden_act="x"), ConfigError, "hidden_act is 'x'"),
    "both norms": (tiny_eagle3(norm_before_fc=True, fc_norm=True), ConfigError, "exclude each other"),
    "flag of another type": (tiny_eagle3(norm_output="yes"), ConfigError, "norm_output is 'yes'"),
    "ids of another type": (tiny_eagle3(**{LAYER_IDS: "2,4"}), ConfigError, LAYER_IDS),
    "no nested config": (tiny_speculators(transformer_layer_config=None), ConfigError, "transformer_layer_config"),
    "broken config": (tiny_eagle3(hidden_size="wide"), ConfigError, "config.json cannot be used"),
    "other layers": (tiny_eagle3(model_type="gemma2"), UnsupportedModelError, "'gemma2'"),
    "dynamic rope": (
        tiny_eagle3(rope_scaling={"type": "dynamic", "factor": 2.0}),
        UnsupportedModelError,
        "the rotary embedding",
    ),
    "broken rope": (
        tiny_eagle3(rope_scaling={"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": "x"}),
        ConfigError,
        "cannot be used",
    ),
    "window without size": (
        tiny_speculators(layer={"layer_types": ["sliding_attention"]}),
        ConfigError,
        "sliding_window must be at least 1, got None",
    ),
    "chunked": (tiny_speculators(layer={"layer_types": ["chunked_attention"]}), UnsupportedModelError, "chunked"),
    "narrow without embedding": (
        _without(tiny_narrow_eagle3(), "embed_tokens.weight"),
        UnsupportedModelError,
        "without embed_tokens",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_head_that_does_not_fit_is_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    draft, error, reason = REFUSED[name]
    with pytest.raises(error, match=reason) as caught:
        load(draft.write(tmp_path / "draft"))
    assert "draft" in str(caught.value)


def _wrapped(draft: TinyDraft) -> TinyDraft:
    """The same draft under the names that transformers gives to the parts of a language model."""
    outside = ("lm_head.weight", "d2t", "t2d")
    return TinyDraft(draft.config, {n if n in outside else f"model.{n}": t for n, t in draft.tensors.items()})


@pytest.mark.parametrize(
    ("draft", "missing", "reshaped"),
    [
        (tiny_eagle3(), "midlayer.mlp.down_proj.weight", "midlayer.mlp.up_proj.weight"),
        (tiny_speculators(), "layers.0.mlp.down_proj.weight", "layers.0.mlp.up_proj.weight"),
        (_wrapped(tiny_eagle3()), "model.midlayer.mlp.down_proj.weight", "model.midlayer.mlp.up_proj.weight"),
        (_wrapped(tiny_eagle3()), "model.norm.weight", "lm_head.weight"),
        (_wrapped(tiny_eagle3()), "model.fc.weight", "model.norm.weight"),
        (_wrapped(tiny_eagle()), "model.fc.bias", "model.layers.0.mlp.up_proj.weight"),
        (_wrapped(tiny_eagle3()), "lm_head.weight", "model.norm.weight"),
    ],
)
def test_errors_name_tensors_as_in_the_file(draft: TinyDraft, missing: str, reshaped: str, tmp_path: Path) -> None:
    shape = [*draft.tensors[reshaped].shape[:-1], 7]
    changed = _without(draft, missing)
    changed.tensors[reshaped] = torch.zeros(shape)
    with pytest.raises(UnsupportedModelError) as caught:
        load(changed.write(tmp_path))
    was = list(draft.tensors[reshaped].shape)
    assert f"missing: {missing}; wrong shapes: {reshaped} is {shape} instead of {was}." in str(caught.value)


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ({"hidden": 64}, "32, but the target has 64"),
        ({"vocab": 100}, "96 tokens, but the target has 100"),
        ({"num_layers": 4}, "too few for the default early, middle and late layers"),
    ],
    ids=["hidden size", "vocabulary", "depth"],
)
def test_a_head_of_another_target_is_refused(target: dict[str, int], reason: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        load(tiny_eagle3().write(tmp_path), tiny_target(**target))


@pytest.mark.parametrize("value", [None, "x", -1, 0, [], {}, {"a": 1}, 1.5, 10**12, ["a"]], ids=repr)
def test_every_wrong_config_value_is_refused_with_a_reason(value: Any, tmp_path: Path) -> None:
    for draft in (tiny_eagle3(), tiny_eagle(), tiny_speculators(kind="qwen3")):
        config = draft.config.get("transformer_layer_config", draft.config)
        original = dict(config)
        others = [
            "eagle_config",
            "rope_scaling",
            "layer_types",
            "partial_rotary_factor",
            "target_hidden_size",
            "fc_norm",
        ]
        for key in [*original, *others]:
            config.clear()
            config.update(original, **{key: value})
            with contextlib.suppress(BatonError):  # some of these values mean nothing bad
                load(draft.write(tmp_path))
