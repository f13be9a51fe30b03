"""The head's network against the canonical forward, written out plainly in float64; and paged against unpaged."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.core.drafts import ScheduledSequence
from baton.core.errors import UnsupportedModelError
from baton.core.kv_spec import KVCacheSpec
from baton.core.request import Request, SamplingParams
from baton.engine.attention.torch_sdpa import TorchSDPA
from baton.engine.batch.batch import ForwardBatch
from baton.engine.batch.hidden_states import FINAL_HIDDEN
from baton.engine.draft.eagle.eagle_checkpoint import load_eagle, settle_feature_layers
from baton.engine.draft.eagle.head import EagleHead
from baton.engine.draft.rows import DraftRows, PagedAttend
from baton.engine.kv_cache.paged_cache import PagedKVCache
from tests.tiny_drafts import (
    HIDDEN,
    VOCAB,
    TinyDraft,
    tiny_eagle,
    tiny_eagle3,
    tiny_narrow_eagle3,
    tiny_speculators,
    tiny_target,
)

CPU = torch.device("cpu")
LENGTH = 23
WINDOW = 5
BLOCK_SIZE = 4
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}

DRAFTS: dict[str, TinyDraft] = {
    "eagle": tiny_eagle(),
    "eagle without bias or embedding": tiny_eagle(bias=False, embedding=False),
    "eagle of two layers": tiny_eagle(num_layers=2),
    "eagle3": tiny_eagle3(),
    "eagle3 with other ids": tiny_eagle3(eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 3, 6]}),
    "eagle3 of two features": tiny_eagle3(num_features=2, eagle_aux_hidden_state_layer_ids=[1, 4]),
    "eagle3.1 fc_norm": tiny_eagle3(fc_norm=True, norm_output=True),
    "eagle3 nested flag": tiny_eagle3(norm_before_fc=False, eagle_config={"norm_before_fc": True}),
    "eagle3 rescaled rope": tiny_eagle3(rope_scaling={"type": "linear", "factor": 4.0}),
    "eagle3 llama3 rope": tiny_eagle3(rope_scaling=LLAMA3_ROPE),
    "eagle3 narrower than its target": tiny_narrow_eagle3(),
    "speculators": tiny_speculators(),
    "speculators flags": tiny_speculators(norm_before_residual=False, norm_before_fc=True, norm_output=True),
    "speculators qwen3": tiny_speculators(kind="qwen3"),
    "speculators window": tiny_speculators(
        kind="qwen3",
        num_layers=2,
        layer={
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "speculators of three layers": tiny_speculators(num_layers=3),
}


def load(draft: TinyDraft, folder: Path, target: Any) -> EagleHead:
    return load_eagle(draft.write(folder), target, torch.float32, CPU)


def rms(tensor: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return tensor / (tensor.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight


class Reference:
    """The canonical forward over a whole sequence."""

    def __init__(self, draft: TinyDraft, target: Any) -> None:
        self.config = draft.config
        self.layer_config = draft.config.get("transformer_layer_config", draft.config)
        self.w = {name: t.double() if t.is_floating_point() else t for name, t in draft.tensors.items()}
        self.embedding = self.w.get("embed_tokens.weight", target.model.embed_tokens.weight.double())
        self.lm_head = self.w.get("lm_head.weight", target.lm_head.weight.double())
        self.is_eagle3 = "norm.weight" in self.w

    def flag(self, name: str, default: bool = False) -> bool:
        return bool(self.config.get("eagle_config", {}).get(name, self.config.get(name, default)))

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        if not self.is_eagle3:
            return features
        if self.flag("norm_before_fc"):
            features = rms(features, self.w["input_norm.weight"])
        elif self.flag("fc_norm"):
            parts = features.split(HIDDEN, dim=-1)
            features = torch.cat([rms(part, self.w[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)], -1)
        return features @ self.w["fc.weight"].T

    def forward(self, tokens: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What is fed back, and logits."""
        e = self.embedding[tokens]
        count = int(self.layer_config["num_hidden_layers"])
        if not self.is_eagle3:
            x = torch.cat([e, hidden], -1) @ self.w["fc.weight"].T + self.w.get("fc.bias", torch.zeros(1).double())
            for index in range(count):
                prefix = f"layers.{index}"
                normed = x if index == 0 else rms(x, self.w[f"{prefix}.input_layernorm.weight"])
                x = self.layer(prefix, index, normed, x)
            return x, x @ self.lm_head.T
        first = "midlayer" if "midlayer.hidden_norm.weight" in self.w else "layers.0"
        h = rms(hidden, self.w[f"{first}.hidden_norm.weight"])
        r = h if self.flag("norm_before_residual", "speculators_model_type" in self.config) else hidden
        e = rms(e, self.w[f"{first}.input_layernorm.weight"])
        x = self.layer(first, 0, torch.cat([e, h], -1), r)
        for index in range(1, count):
            x = self.layer(f"layers.{index}", index, rms(x, self.w[f"layers.{index}.input_layernorm.weight"]), x)
        y = rms(x, self.w["norm.weight"])
        return (y if self.flag("norm_output") else x), y @ self.lm_head.T

    def layer(self, prefix: str, index: int, states: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        x = residual + self.attention(f"{prefix}.self_attn", index, states)
        n = rms(x, self.w[f"{prefix}.post_attention_layernorm.weight"])
        gate = n @ self.w[f"{prefix}.mlp.gate_proj.weight"].T
        up = n @ self.w[f"{prefix}.mlp.up_proj.weight"].T
        return x + (gate * torch.sigmoid(gate) * up) @ self.w[f"{prefix}.mlp.down_proj.weight"].T

    def attention(self, prefix: str, index: int, states: torch.Tensor) -> torch.Tensor:
        dim, length = self.layer_config["head_dim"], len(states)
        q, k, v = ((states @ self.w[f"{prefix}.{n}_proj.weight"].T).view(length, -1, dim) for n in "qkv")
        if f"{prefix}.q_norm.weight" in self.w:
            q, k = rms(q, self.w[f"{prefix}.q_norm.weight"]), rms(k, self.w[f"{prefix}.k_norm.weight"])
        types = self.layer_config.get("layer_types", ["full_attention"] * 9)
        outputs = torch.zeros(length, q.shape[1], dim, dtype=torch.float64)
        for head in range(q.shape[1]):
            shared = head // (q.shape[1] // k.shape[1])
            for i in range(length):
                start = max(0, i - WINDOW + 1) if types[index] == "sliding_attention" else 0
                keys = torch.stack([self.rotated(k[j, shared], j) for j in range(start, i + 1)])
                weights = torch.softmax(keys @ self.rotated(q[i, head], i) / math.sqrt(dim), 0)
                outputs[i, head] = weights @ v[start : i + 1, shared]
        return outputs.flatten(1) @ self.w[f"{prefix}.o_proj.weight"].T

    def rotated(self, vector: torch.Tensor, position: int) -> torch.Tensor:
        half = len(vector) // 2
        angles = position * torch.tensor([self.frequency(i, half) for i in range(half)], dtype=torch.float64)
        a, b = vector[:half], vector[half:]
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()])

    def frequency(self, index: int, half: int) -> float:
        plain = self.layer_config["rope_theta"] ** (-index / half)
        scaling: Mapping[str, Any] = self.layer_config.get("rope_scaling") or {}
        if not scaling:
            return plain
        if scaling.get("type") == "linear":
            return plain / scaling["factor"]
        old = scaling["original_max_position_embeddings"]
        turns = old * plain / (2 * math.pi)
        blend = min(1.0, max(0.0, (turns - 1.0) / (4.0 - 1.0)))
        return (1 - blend) * plain / scaling["factor"] + blend * plain


def inputs(head: EagleHead, length: int = LENGTH, seed: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and features."""
    generator = torch.Generator().manual_seed(seed)
    width = HIDDEN * len(head.feature_layers)
    tokens = torch.randint(VOCAB, (length,), generator=generator)
    return tokens, 3 * torch.randn(length, width, generator=generator)


@pytest.mark.parametrize("name", DRAFTS)
def test_every_format_computes_the_canonical_forward(name: str, tmp_path: Path) -> None:
    target = tiny_target()
    head, reference = load(DRAFTS[name], tmp_path, target), Reference(DRAFTS[name], target)
    tokens, features = inputs(head)

    hidden = head.fuse(features)
    fed_back, for_logits = head(tokens, hidden, torch.arange(LENGTH))
    expected, expected_logits = reference.forward(tokens, reference.fuse(features.double()))

    torch.testing.assert_close(fed_back.double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(head.logits(for_logits).double(), expected_logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", DRAFTS)
def test_each_sequence_of_a_batch_gets_its_own_result(name: str, tmp_path: Path) -> None:
    head = load(DRAFTS[name], tmp_path, tiny_target())
    tokens, features = zip(*(inputs(head, seed=seed) for seed in (1, 2)), strict=True)
    together, _ = head(torch.stack(tokens), head.fuse(torch.stack(features)), torch.arange(LENGTH))
    for index in range(2):
        alone, _ = head(tokens[index], head.fuse(features[index]), torch.arange(LENGTH))
        torch.testing.assert_close(together[index], alone, rtol=1e-4, atol=1e-4)


class Paged:
    """A head over a paged cache, whose block ids are scattered as a target's are."""

    def __init__(self, head: EagleHead, block_lists: list[list[int]]) -> None:
        self.head = head
        self.cache = PagedKVCache(KVCacheSpec("", "float32", BLOCK_SIZE, head.layer_specs), 32, CPU)
        self.backend = TorchSDPA(self.cache)
        self.requests = [Request(str(index), [0] * LENGTH, SamplingParams()) for index in range(len(block_lists))]
        for request, blocks in zip(self.requests, block_lists, strict=True):
            request.block_ids[:] = blocks

    def run(self, rows: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> dict[int, torch.Tensor]:
        """Computes the next rows (tokens, hidden) of some sequences in one pass; their outputs."""
        plan = [ScheduledSequence(self.requests[index], len(rows[index][0])) for index in rows]
        batch = ForwardBatch.build(plan, BLOCK_SIZE, CPU, torch.float32)
        order = [int(sequence.request.request_id) for sequence in batch.sequences]
        tokens = torch.cat([rows[index][0] for index in order])
        hidden = torch.cat([rows[index][1] for index in order])
        placed = DraftRows(batch.positions, batch.slots, batch.groups, [])
        output, _ = self.head(tokens, hidden, batch.positions, PagedAttend(self.backend, placed, 0))
        sizes = [len(rows[index][0]) for index in order]
        for index, size in zip(order, sizes, strict=True):
            self.requests[index].num_computed_tokens += size
        return dict(zip(order, output.split(sizes), strict=True))


@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize("chunks", [[LENGTH], [1] * LENGTH, [7, 1, 9, 6]], ids=["whole", "one by one", "chunks"])
def test_paged_chunks_match_the_whole_sequence(name: str, chunks: list[int], tmp_path: Path) -> None:
    head = load(DRAFTS[name], tmp_path, tiny_target())
    tokens, features = inputs(head)
    hidden = head.fuse(features)
    expected, _ = head(tokens, hidden, torch.arange(LENGTH))

    paged = Paged(head, [[9, 2, 30, 4, 11, 0]])
    pieces = zip(tokens.split(chunks), hidden.split(chunks), strict=True)
    outputs = [paged.run({0: piece})[0] for piece in pieces]

    torch.testing.assert_close(torch.cat(outputs), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["eagle", "eagle3.1 fc_norm", "speculators window"])
def test_sequences_of_one_batch_do_not_see_each_other(name: str, tmp_path: Path) -> None:
    head = load(DRAFTS[name], tmp_path, tiny_target())
    rows = []
    for seed in range(3):
        tokens, features = inputs(head, seed=seed)
        rows.append((tokens, head.fuse(features)))
    expected = [head(tokens, hidden, torch.arange(LENGTH))[0] for tokens, hidden in rows]

    paged = Paged(head, [[9, 2, 30, 4, 11, 0], [1, 3, 5, 7, 12, 13], [20, 21, 22, 23, 24, 25]])
    outputs: list[list[torch.Tensor]] = [[], [], []]
    for sizes in [(5, 1, 8), (1, 1, 1), (4, 12, 1), (13, 9, 13)]:
        starts = [request.num_computed_tokens for request in paged.requests]
        step = {i: tuple(part[starts[i] : starts[i] + sizes[i]] for part in rows[i]) for i in range(3)}
        for index, output in paged.run(step).items():
            outputs[index].append(output)

    for index in range(3):
        torch.testing.assert_close(torch.cat(outputs[index]), expected[index], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["eagle", "eagle3", "speculators qwen3"])
def test_recursive_drafting_matches_one_longer_sequence(name: str, tmp_path: Path) -> None:
    """Rows of drafted tokens extend the cache, so the third step equals a pass over all rows so far."""
    head = load(DRAFTS[name], tmp_path, tiny_target())
    tokens, features = inputs(head, length=6)
    hidden = head.fuse(features)
    paged = Paged(head, [[9, 2, 30, 4]])
    output = paged.run({0: (tokens, hidden)})[0]
    for _ in range(3):
        _, normed = head(tokens, hidden, torch.arange(len(tokens)))
        drafted = head.to_target_ids(head.logits(normed[-1:]).argmax(-1))
        tokens, hidden = torch.cat([tokens, drafted]), torch.cat([hidden, output[-1:]])
        output = paged.run({0: (drafted, output[-1:])})[0]
    expected, _ = head(tokens, hidden, torch.arange(len(tokens)))
    torch.testing.assert_close(output, expected[-1:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["eagle", "eagle3", "eagle3 nested flag", "speculators qwen3"])
def test_computing_only_kv_stores_the_same_as_a_full_pass(name: str, tmp_path: Path) -> None:
    head = load(DRAFTS[name], tmp_path, tiny_target())
    tokens, features = inputs(head, length=2 * BLOCK_SIZE)
    hidden = head.fuse(features)
    paged = Paged(head, [[0, 1]])
    paged.run({0: (tokens, hidden)})
    keys, values = head.keys_values(tokens, hidden, torch.arange(len(tokens)))
    torch.testing.assert_close(keys, paged.cache.keys[0][: len(tokens)], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(values, paged.cache.values[0][: len(tokens)], rtol=1e-5, atol=1e-5)


def test_computing_only_kv_is_refused_if_kv_depends_on_attention(tmp_path: Path) -> None:
    head = load(DRAFTS["eagle of two layers"], tmp_path, tiny_target())
    tokens, features = inputs(head)
    with pytest.raises(UnsupportedModelError, match="2 layers"):
        head.keys_values(tokens, features, torch.arange(LENGTH))


def test_draft_ids_map_to_the_tokens_marked_in_t2d(tmp_path: Path) -> None:
    draft = tiny_eagle3()
    head = load(draft, tmp_path, tiny_target())
    ids = head.to_target_ids(torch.arange(head.draft_vocab_size))
    assert ids.tolist() == draft.tensors["t2d"].nonzero().flatten().tolist()


def test_the_head_holds_no_weights_of_the_target(tmp_path: Path) -> None:
    target = tiny_target()
    head = load(tiny_eagle(embedding=False), tmp_path, target)
    assert head.feature_layers == (FINAL_HIDDEN,)
    assert not {id(p) for p in head.parameters()} & {id(p) for p in target.parameters()}
    assert not {"embed_tokens.weight", "lm_head.weight"} & head.state_dict().keys()


def test_a_half_precision_head_keeps_exact_angles(tmp_path: Path) -> None:
    """Positions far out need float32 frequencies, whatever the network computes in."""
    head = load_eagle(tiny_eagle3().write(tmp_path), tiny_target(), torch.bfloat16, CPU)
    far = torch.tensor([4001])
    cos, _ = head._rotary(far, torch.float64)
    expected = torch.cos(4001 * 10000.0 ** (-torch.arange(8, dtype=torch.float64) / 8))
    torch.testing.assert_close(cos[0, 0, :8], expected, rtol=0, atol=1e-3)
    tokens, features = inputs(head)
    output, _ = head(tokens, head.fuse(features.bfloat16()), torch.arange(LENGTH))
    assert output.dtype == torch.bfloat16


def test_ambiguous_layer_ids_are_resolved_by_agreement(tmp_path: Path) -> None:
    """The target's choices are made to be what the head says of one reading; that reading must win."""
    draft = tiny_eagle3(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 4]})
    head = load(draft, tmp_path, tiny_target())
    assert head.feature_layer_choices == ((2, 4, 5), (1, 3, 4))
    tokens, _ = inputs(head)
    generator = torch.Generator().manual_seed(3)
    hidden_states = {layer: torch.randn(LENGTH, HIDDEN, generator=generator) for layer in range(9)}
    for truth in head.feature_layer_choices:
        features = torch.cat([hidden_states[layer] for layer in truth], -1)
        _, normed = head(tokens[1:], head.fuse(features[:-1]), torch.arange(LENGTH - 1))
        choices = torch.cat([torch.zeros(1).long(), head.to_target_ids(head.logits(normed).argmax(-1))])
        found = settle_feature_layers(head, hidden_states, tokens, choices)
        assert head.feature_layers == truth
        assert found[truth] == 1.0
        assert min(found.values()) < 0.5
