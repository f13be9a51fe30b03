"""The settings of training, by kind of draft."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from baton.core.errors import ConfigError

# Settings that may change when a run is resumed.
FREE_SETTINGS = frozenset({"budget_s", "report_every_steps", "save_every_s", "num_evaluated_samples"})


DRAFT_VOCAB_SIZE = 8192
"""The size of a new draft vocabulary."""


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    """The settings of one training run. A resumed run must have the same, except for :data:`FREE_SETTINGS`.

    Attributes:
        tv_weight: share of the loss that is total variation instead of cross entropy, from 0 to 1.
        num_epochs: number of passes over the data, unless the budget ends first.
        budget_s: seconds from reading the data to the last step; ``None`` means no limit. The learning rate follows
            the epochs or the budget, whichever has advanced further, so that it ends at 0 in either case.
        rows_per_batch: approximate number of answer tokens of one optimizer step.
        learning_rate: the maximum, reached after ``warmup_steps``.
        held_out_share: share of the samples that are only evaluated.
        num_evaluated_samples: maximum number of held-out samples in the final evaluation.
        num_draft_tokens: length of the drafted chains in the evaluation.
        dtype: dtype in which the draft computes; weights are always optimised in float32.

    Raises:
        ConfigError: a value is out of its range.
    """

    tv_weight: float = 0.0
    num_epochs: int = 5
    budget_s: float | None = None
    rows_per_batch: int = 2048
    learning_rate: float = 5e-4
    warmup_steps: int = 50
    weight_decay: float = 0.01
    max_grad_norm: float = 0.5
    held_out_share: float = 0.02
    num_evaluated_samples: int = 256
    num_draft_tokens: int = 5
    report_every_steps: int = 20
    evaluate_every_steps: int = 250
    save_every_s: float = 300.0
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        _check_counts(
            self,
            "num_epochs",
            "rows_per_batch",
            "warmup_steps",
            "num_evaluated_samples",
            "num_draft_tokens",
            "report_every_steps",
            "evaluate_every_steps",
        )
        for name in ("learning_rate", "max_grad_norm", "save_every_s"):
            _check(name, getattr(self, name), getattr(self, name) > 0, "a number above 0")
        _check("weight_decay", self.weight_decay, self.weight_decay >= 0, "0 or more")
        _check("tv_weight", self.tv_weight, 0 <= self.tv_weight <= 1, "from 0 to 1")
        _check("held_out_share", self.held_out_share, 0 < self.held_out_share <= 0.5, "above 0 and at most 0.5")
        _check("budget_s", self.budget_s, self.budget_s is None or self.budget_s > 0, "a number of seconds above 0")
        _check("dtype", self.dtype, self.dtype in ("auto", "float32", "bfloat16"), "auto, float32 or bfloat16")


@dataclass(frozen=True, slots=True)
class Eagle3Settings(TrainingSettings):
    """The settings of an EAGLE-3.1 head.

    Attributes:
        draft_vocab_size: size of the draft vocabulary, at most that of the target or of the head to start from;
            ``None`` means the head's, or :data:`DRAFT_VOCAB_SIZE` without one.
        feature_layers: as in ``EagleSettings``; ``None`` means the usual early, middle and late layer.
        num_kv_heads: KV heads of the head's attention; ``None`` means the target's number. Draft KV grows with it.
        num_ttt_steps: length of the chains that the head drafts in training (training-time test).
        step_decay: the loss of step ``s`` has the weight ``step_decay ** s``.
        start_from: an EAGLE-3 checkpoint, a folder or a hub id, whose weights, shape and draft vocabulary are the
            initial ones; ``None`` means a linear model of the target.
    """

    draft_vocab_size: int | None = None
    start_from: str | None = None
    feature_layers: tuple[int, ...] | None = None
    num_kv_heads: int | None = None
    num_ttt_steps: int = 4
    step_decay: float = 0.8

    def __post_init__(self) -> None:
        TrainingSettings.__post_init__(self)
        _check_counts(self, "draft_vocab_size", "num_kv_heads", "num_ttt_steps")
        _check("step_decay", self.step_decay, 0 < self.step_decay <= 1, "above 0 and at most 1")


@dataclass(frozen=True, slots=True)
class MedusaSettings(TrainingSettings):
    """The settings of Medusa heads.

    Attributes:
        draft_vocab_size: size of the draft vocabulary, at most the target's.
        num_heads: number of heads, each of which guesses one token.
        num_blocks: residual blocks of each head.
        step_decay: the loss of head ``i`` has the weight ``step_decay ** i``.
        train_lm_head: False keeps the shared lm_head equal to the target's.
        num_tree_tokens: size of the tree that is evaluated besides chains.
    """

    learning_rate: float = 1e-3
    draft_vocab_size: int = DRAFT_VOCAB_SIZE
    num_heads: int = 4
    num_blocks: int = 1
    step_decay: float = 0.8
    train_lm_head: bool = True
    num_tree_tokens: int = 32

    def __post_init__(self) -> None:
        TrainingSettings.__post_init__(self)
        _check_counts(self, "draft_vocab_size", "num_heads", "num_blocks", "num_tree_tokens")
        _check("step_decay", self.step_decay, 0 < self.step_decay <= 1, "above 0 and at most 1")


@dataclass(frozen=True, slots=True)
class DraftModelSettings(TrainingSettings):
    """The settings of a draft model.

    Attributes:
        num_layers: number of layers.
        hidden_size: ``None`` means the target's size; the draft then starts with the target's embedding and, if both
            are Llamas, with some of its layers. A smaller one starts with the main components of the embedding.
        num_heads: attention heads; ``None`` means as many as the target's head size gives.
        num_kv_heads: ``None`` means the target's share of ``num_heads``.
        intermediate_size: size of the feed-forward; ``None`` means the target's in proportion to ``hidden_size``.
        train_embedding: False keeps embedding and lm_head equal to the target's; has no effect with another
            ``hidden_size``.
    """

    num_layers: int = 4
    hidden_size: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    intermediate_size: int | None = None
    train_embedding: bool = False

    def __post_init__(self) -> None:
        TrainingSettings.__post_init__(self)
        _check_counts(self, "num_layers", "hidden_size", "num_heads", "num_kv_heads", "intermediate_size")


def _check_counts(settings: TrainingSettings, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        _check(name, value, value is None or value >= 1, "a whole number from 1")


def _check(name: str, value: object, is_good: bool, expected: str) -> None:
    if not is_good:
        raise ConfigError(f"training: {name} is {value!r}, expected {expected}.")
