"""Trains a small language model to draft for a target, by distillation on the target's own answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, LlamaForCausalLM

from baton.engine.draft.checkpoint import let_others_read
from baton.engine.draft.model.draft_model import DraftModel, load_draft_model
from baton.engine.models.model_loader import LoadedModel
from baton.engine.models.tokenizer import Tokenizer
from baton.train.batches import make_rows, num_rows_of
from baton.train.card import Description
from baton.train.dataset import Sample
from baton.train.draft_init import draft_config, initial_draft
from baton.train.evaluate import Acceptance, Evaluation, accepted, answers_of
from baton.train.objective import Losses, StepLoss, compute_dtype
from baton.train.run import HeldOut, TrainingData
from baton.train.settings import DraftModelSettings
from baton.train.target import batches_by_length, padded, use_fast_attention

_ROWS_AT_ONCE = 256


class DraftModelMethod:
    """Implements :class:`baton.train.run.Method`.

    Args:
        tokenizer: the tokenizer of target and draft.

    Raises:
        ConfigError: see :func:`baton.train.draft_init.draft_config`.
    """

    feature_layers = ()

    def __init__(self, settings: DraftModelSettings, target: LoadedModel, tokenizer: Tokenizer) -> None:
        self.settings = settings
        self._target = target
        self._tokenizer = tokenizer
        self._layers: tuple[int, ...] = ()
        draft_config(settings, target)

    def objective(self, data: TrainingData) -> _Objective:
        draft, self._layers = initial_draft(self.settings, self._target)
        return _Objective(draft, self.settings, self._target, data)

    def write(self, network: nn.Module, folder: Path, target_name: str) -> None:
        draft: Any = network.to(torch.bfloat16)
        draft.save_pretrained(folder)
        for path in folder.glob("*.safetensors"):
            let_others_read(path)
        self._tokenizer.save(folder)

    def evaluate(self, folder: Path, held_out: HeldOut) -> Evaluation:
        dtype = str(compute_dtype(self.settings, self._target.model)).removeprefix("torch.")
        draft = load_draft_model(str(folder), self._target, self._tokenizer, self._target.model.device, dtype)
        return evaluate(draft, held_out, self.settings.num_draft_tokens)

    def describe(self, network: nn.Module) -> Description:
        config: Any = network.config
        begin = f"layers {', '.join(map(str, self._layers))} of the target" if self._layers else "random weights"
        return Description(
            title="Draft model",
            tag="draft-model",
            text="A small Llama with the target's vocabulary, distilled from the target.",
            rows=(
                ("layers", f"{config.num_hidden_layers}, {config.hidden_size} wide; initialized with {begin}"),
                ("heads", f"{config.num_attention_heads} ({config.num_key_value_heads} KV heads)"),
            ),
        )


class _Objective:
    """Implements :class:`baton.train.objective.Objective`: predicts the next token after true tokens."""

    num_steps = 1

    def __init__(
        self, draft: LlamaForCausalLM, settings: DraftModelSettings, target: LoadedModel, data: TrainingData
    ) -> None:
        use_fast_attention(draft)
        self.network: nn.Module = draft
        self._draft: Any = draft
        self._loss = StepLoss(target.model, None, self.num_steps, 1.0, settings)
        self._data = data

    def losses(self, indices: Sequence[int]) -> Losses:
        batch = self._data.rows(indices)
        hidden = self._hidden([self._data.samples[index] for index in indices])
        return self._loss([hidden], batch, self._draft.lm_head.weight)

    def _hidden(self, samples: Sequence[Sample]) -> torch.Tensor:
        """The draft's final hidden states at the rows' tokens, ``[num_rows, hidden_size]``."""
        found: dict[int, torch.Tensor] = {}
        for group in batches_by_length([len(sample.token_ids) for sample in samples]):
            token_ids = padded([samples[index] for index in group]).to(self._draft.device)
            output = self._draft.model(input_ids=token_ids, use_cache=False).last_hidden_state
            for row, index in enumerate(group):
                first = max(1, samples[index].num_prompt_tokens)
                found[index] = output[row, first : first + num_rows_of(samples[index])]
        return torch.cat([found[index] for index in range(len(samples))])


@torch.no_grad()
def evaluate(draft: DraftModel, held_out: HeldOut, num_draft_tokens: int) -> Evaluation:
    """Drafts greedily after every answer token, with the model's own tokens as input from the second one on."""
    use_fast_attention(draft.loaded.model)
    found = Evaluation(Acceptance(), Acceptance())
    for samples, states in held_out:
        for sample, answer in zip(samples, answers_of(make_rows(samples, states)), strict=True):
            found.of(answer).add(accepted(_drafts(draft, sample, num_draft_tokens), answer.next_token_ids))
    return found


def _drafts(draft: DraftModel, sample: Sample, num_draft_tokens: int) -> torch.Tensor:
    """The tokens drafted from each row, int64 ``[num_draft_tokens, num_rows]``.

    The chains of all rows grow together, after the sample in one cache. Each attends to the sample up to its row, and
    to itself.
    """
    model: Any = draft.loaded.model
    device = model.device
    first, count = max(1, sample.num_prompt_tokens), num_rows_of(sample)
    rows = torch.arange(first, first + count, device=device)
    cache = DynamicCache(config=model.config)
    tokens = torch.tensor([sample.token_ids], device=device)
    hidden = model.get_decoder()(input_ids=tokens, past_key_values=cache, use_cache=True).last_hidden_state[0, rows]
    least = torch.finfo(hidden.dtype).min
    sees = torch.arange(tokens.shape[1], device=device) <= rows[:, None]
    itself = torch.eye(count, dtype=torch.bool, device=device)
    drafts = [_choices(draft, hidden)]
    for step in range(1, num_draft_tokens):
        sees = torch.cat((sees, itself), dim=1)
        mask = torch.zeros_like(sees, dtype=hidden.dtype).masked_fill_(~sees, least)
        output = model.get_decoder()(
            input_ids=drafts[-1][None],
            position_ids=(rows + step)[None],
            attention_mask=mask[None, None],
            past_key_values=cache,
            use_cache=True,
        )
        drafts.append(_choices(draft, output.last_hidden_state[0]))
    return torch.stack(drafts)


def _choices(draft: DraftModel, hidden: torch.Tensor) -> torch.Tensor:
    lm_head: Any = draft.loaded.model.get_output_embeddings()
    parts = [lm_head(part)[:, : draft.num_shared_tokens].argmax(dim=-1) for part in torch.split(hidden, _ROWS_AT_ONCE)]
    return torch.cat(parts)
