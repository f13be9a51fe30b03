"""The options of ``baton train``. The command line derives its options and their help from these models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from baton.core.config_section import CommandOption, Section
from baton.core.errors import ConfigError
from baton.core.option_text import numbers
from baton.engine.models.default_model import DEFAULT_MODEL_NAME

_HIGHEST_TEMPERATURE = 2.0

DraftVocabulary = Annotated[
    int | None,
    CommandOption(("--draft-vocab",)),
    Field(
        ge=1,
        description="Size of the draft vocabulary, the most frequent tokens. Default: 8192, or the size with --from.",
    ),
]


class TrainOptions(Section):
    """Options of every kind of draft. ``None`` leaves the choice to the kind, the model or the cache folder.

    The names of a kind's other fields are those of its :class:`baton.train.settings.TrainingSettings`.
    """

    model: Annotated[str, Field(description="The target model: its name, a hub id, a folder or a .gguf file.")] = (
        DEFAULT_MODEL_NAME
    )
    prompts: Annotated[
        list[Path] | None,
        CommandOption(metavar="FILE"),
        Field(
            description='JSONL file of {"prompt": ...}; may be repeated. Default: the target writes its own prompts.'
        ),
    ] = None
    template_prompts: Annotated[
        int,
        Field(ge=0, description="Number of prompts made from baton's templates: code, translation, several turns, …"),
    ] = 0
    tokens: Annotated[
        int, Field(ge=1, description="Number of answer tokens to collect. More data helps more than more epochs.")
    ] = 1_000_000
    # Shorter answers are useless; see baton/train/collect.py.
    max_answer_tokens: Annotated[int, Field(ge=8, description="Maximum number of tokens of an answer.")] = 320
    temperatures: Annotated[
        str, Field(description="Sampling temperatures of the answers, used in turn; 0 is greedy.")
    ] = "0,0.8"
    self_prompts: Annotated[
        float | None,
        Field(ge=0, le=1, description="Share of the prompts that the target writes itself. Default: 0.5 with others."),
    ] = None
    batch: Annotated[
        int, Field(ge=1, description="Number of concurrent conversations while answers are collected.")
    ] = 32
    work: Annotated[
        Path | None,
        Field(
            description="Folder of the answers, hidden states and training state. Default: one per target in the cache."
        ),
    ] = None
    out: Annotated[
        Path | None,
        CommandOption(("-o", "--out")),
        Field(description="Output folder of the draft. Default: out/MODEL-KIND."),
    ] = None
    num_epochs: Annotated[
        int | None,
        CommandOption(("--epochs",)),
        Field(ge=1, description="Passes over the answers. Default: 5."),
    ] = None
    minutes: Annotated[
        float | None,
        Field(
            gt=0,
            description="Time limit of the training, without collecting answers; the learning rate decays to 0 by "
            "then.",
        ),
    ] = None
    learning_rate: Annotated[
        float | None, Field(description="Peak learning rate. Default: 5e-4 for eagle3 and draft, 1e-3 for medusa.")
    ] = None
    device: Annotated[Literal["auto", "cpu", "cuda"], Field(description="Device of target and draft.")] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        Field(description="Data type of target and draft."),
    ] = "auto"
    threads: Annotated[int | None, Field(ge=1, description="Number of torch's CPU threads. Default: all cores.")] = None
    seed: Annotated[int, Field(description="Seed of the answers, the initial weights and the data order.")] = 0
    cache_states: Annotated[
        bool,
        Field(description="Keep the target's hidden states in the work folder, or recompute them in each epoch."),
    ] = True
    license: Annotated[str | None, Field(description="SPDX identifier for the model card.")] = None

    @field_validator("temperatures")
    @classmethod
    def _are_temperatures(cls, text: str) -> str:
        values = numbers("--temperatures", text)
        if not values or not all(0 <= value <= _HIGHEST_TEMPERATURE for value in values):
            raise ConfigError(f"--temperatures is {values!r}, expected at least one number, all from 0 to 2.")
        return text

    @property
    def answer_temperatures(self) -> tuple[float, ...]:
        return numbers("--temperatures", self.temperatures)

    @property
    def settings(self) -> dict[str, Any]:
        """The given values for the kind's :class:`baton.train.settings.TrainingSettings`."""
        common = {
            "num_epochs": self.num_epochs,
            "budget_s": None if self.minutes is None else self.minutes * 60,
            "learning_rate": self.learning_rate,
            "dtype": self.dtype,
            "seed": self.seed,
        }
        own = {name: getattr(self, name) for name in type(self).model_fields if name not in TrainOptions.model_fields}
        return {name: value for name, value in {**common, **own}.items() if value is not None}


class Eagle3Options(TrainOptions):
    """An EAGLE-3.1 head: one layer on the target's hidden states. It gives the best acceptance for its size."""

    draft_vocab_size: DraftVocabulary = None
    num_kv_heads: Annotated[
        int | None,
        CommandOption(("--kv-heads",)),
        Field(ge=1, description="Number of KV heads. Default: as in the target."),
    ] = None
    num_ttt_steps: Annotated[
        int | None,
        CommandOption(("--ttt-steps",)),
        Field(ge=1, description="Number of consecutive tokens drafted in training. Default: 4."),
    ] = None
    start_from: Annotated[
        str | None,
        CommandOption(("--from",)),
        Field(description="Train this EAGLE-3 head further: a folder, a hub id, or auto for baton's own."),
    ] = None


class MedusaOptions(TrainOptions):
    """Medusa heads: each predicts one further token from the target's last hidden state. Candidates form a tree."""

    draft_vocab_size: DraftVocabulary = None
    num_heads: Annotated[
        int | None,
        CommandOption(("--heads",)),
        Field(ge=1, description="Number of heads, each for one further token. Default: 4."),
    ] = None
    num_blocks: Annotated[
        int | None,
        CommandOption(("--blocks",)),
        Field(ge=1, description="Number of residual blocks per head. Default: 1."),
    ] = None
    train_lm_head: Annotated[
        bool, Field(description="Train the lm_head that all heads share, or keep the target's.")
    ] = True


class DraftModelOptions(TrainOptions):
    """A small language model of the target's vocabulary, distilled from it."""

    num_layers: Annotated[
        int | None,
        CommandOption(("--layers",)),
        Field(ge=1, description="Number of layers; a Llama target provides their initial weights. Default: 4."),
    ] = None
    hidden_size: Annotated[
        int | None,
        CommandOption(("--hidden",)),
        Field(ge=1, description="Hidden size. Default: as in the target, with its embedding."),
    ] = None
    num_heads: Annotated[
        int | None,
        CommandOption(("--heads",)),
        Field(ge=1, description="Number of attention heads. Default: as many as give the target's head size."),
    ] = None
    num_kv_heads: Annotated[
        int | None,
        CommandOption(("--kv-heads",)),
        Field(ge=1, description="Number of KV heads. Default: in the target's proportion."),
    ] = None
    intermediate_size: Annotated[
        int | None,
        CommandOption(("--intermediate",)),
        Field(ge=1, description="Size of the feed-forward layer. Default: in the target's proportion."),
    ] = None
    train_embedding: Annotated[
        bool, Field(description="Also train embedding and lm_head if they come from the target.")
    ] = False


KINDS: dict[str, type[TrainOptions]] = {
    "eagle3": Eagle3Options,
    "medusa": MedusaOptions,
    "draft": DraftModelOptions,
}
"""Options by kind of draft."""
