"""What training an EAGLE-3 head depends on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Eagle3Settings:
    """Choices of one training run. Runs that are resumed must have the same, budget aside.

    Attributes:
        draft_vocab_size: tokens that the head can say; the target's own vocabulary at most.
        feature_layers: as in :class:`engine.draft.eagle.EagleSettings`; None takes the usual early, middle and late.
        num_kv_heads: of the head's attention; None takes the target's. Draft KV grows with it.
        num_ttt_steps: tokens that the head drafts in a row while it is trained (training-time test).
        step_decay: the loss of step ``s`` counts ``step_decay ** s``.
        tv_weight: part of the loss that is total variation instead of cross entropy, from 0 to 1.
        num_epochs: passes over the data, unless the budget ends first.
        budget_s: seconds for everything from reading the data to the last step; None sets no limit. The learning rate
            falls with whichever is further gone, epochs or budget, so that it is 0 at the end in either case.
        rows_per_batch: answer tokens of one optimizer step, about.
        learning_rate: the highest one, after ``warmup_steps``.
        held_out_share: part of the samples that only evaluation sees.
        num_evaluated_samples: of these, as many as this are drafted for at the end.
        num_draft_tokens: drafted in a row in the evaluation.
        dtype: what the head computes in; weights are optimised in float32 in either case.
    """

    draft_vocab_size: int = 8192
    feature_layers: tuple[int, ...] | None = None
    num_kv_heads: int | None = None
    num_ttt_steps: int = 4
    step_decay: float = 0.8
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
        for name in (
            "draft_vocab_size",
            "num_ttt_steps",
            "num_epochs",
            "rows_per_batch",
            "warmup_steps",
            "num_evaluated_samples",
            "num_draft_tokens",
            "report_every_steps",
            "evaluate_every_steps",
        ):
            _check(name, getattr(self, name), getattr(self, name) >= 1, "a whole number from 1")
        for name in ("learning_rate", "max_grad_norm", "save_every_s"):
            _check(name, getattr(self, name), getattr(self, name) > 0, "a number above 0")
        _check("step_decay", self.step_decay, 0 < self.step_decay <= 1, "above 0 and at most 1")
        _check("tv_weight", self.tv_weight, 0 <= self.tv_weight <= 1, "from 0 to 1")
        _check("held_out_share", self.held_out_share, 0 < self.held_out_share <= 0.5, "above 0 and at most 0.5")
        _check("budget_s", self.budget_s, self.budget_s is None or self.budget_s > 0, "a number of seconds above 0")
        _check("dtype", self.dtype, self.dtype in ("auto", "float32", "bfloat16"), "auto, float32 or bfloat16")


def _check(name: str, value: object, is_good: bool, expected: str) -> None:
    if not is_good:
        raise ConfigError(f"training: {name} is {value!r}, expected {expected}.")
