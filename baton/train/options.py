"""What ``baton train`` was asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from baton.core.errors import ConfigError

_DTYPES = ("auto", "float32", "bfloat16")
_DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """Options of every kind of draft. None leaves the choice to the kind, the model or the cache folder.

    Attributes:
        model: the target, as ``model:`` names it.
        prompts: JSON-lines files.
        tokens: answer tokens to collect.
        temperatures: of the answers, taken in turn.
        self_prompts: share of the prompts that the target writes itself.
        batch: conversations at once.
        work: folder of everything that an interrupted run needs.
        out: folder of the checkpoint.
        minutes: of training; collecting comes before.
        cache_states: see :func:`baton.train.run.train`.
        license: of the draft, an SPDX identifier.
        command: how to ask for the same again.
        method: settings of the kind of draft, by name; None for the default.

    Raises:
        ConfigError: a value is out of its range.
    """

    model: str
    command: str
    prompts: tuple[Path, ...] = ()
    tokens: int = 1_000_000
    max_answer_tokens: int = 320
    temperatures: tuple[float, ...] = (0.0, 0.8)
    self_prompts: float | None = None
    batch: int = 32
    work: Path | None = None
    out: Path | None = None
    epochs: int | None = None
    minutes: float | None = None
    learning_rate: float | None = None
    device: str = "auto"
    dtype: str = "auto"
    threads: int | None = None
    seed: int = 0
    cache_states: bool = True
    license: str | None = None
    method: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("tokens", "batch", "threads", "epochs"):
            value = getattr(self, name)
            _check(name, value, value is None or value >= 1, "a whole number from 1")
        # Shorter answers teach nothing, see baton/train/collect.py.
        _check("max_answer_tokens", self.max_answer_tokens, self.max_answer_tokens >= 8, "a whole number from 8")
        is_good = bool(self.temperatures) and all(0 <= temperature <= 2 for temperature in self.temperatures)
        _check("temperatures", self.temperatures, is_good, "at least one number, all from 0 to 2")
        is_good = self.self_prompts is None or 0 <= self.self_prompts <= 1
        _check("self_prompts", self.self_prompts, is_good, "a share from 0 to 1")
        _check("minutes", self.minutes, self.minutes is None or self.minutes > 0, "a number of minutes above 0")
        _check("dtype", self.dtype, self.dtype in _DTYPES, "auto, float32 or bfloat16")
        _check("device", self.device, self.device in _DEVICES, "auto, cpu or cuda")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("--device is cuda, but there is no GPU here that torch can use. Use auto or cpu.")

    @property
    def settings(self) -> dict[str, Any]:
        """Of the kind's :class:`baton.train.settings.TrainingSettings`, where something was asked for."""
        chosen = {
            "num_epochs": self.epochs,
            "budget_s": None if self.minutes is None else self.minutes * 60,
            "learning_rate": self.learning_rate,
            "dtype": self.dtype,
            "seed": self.seed,
        }
        return {name: value for name, value in {**chosen, **self.method}.items() if value is not None}


def _check(name: str, value: object, is_good: bool, expected: str) -> None:
    if not is_good:
        raise ConfigError(f"--{name.replace('_', '-')} is {value!r}, expected {expected}.")
