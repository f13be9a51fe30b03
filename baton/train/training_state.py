"""The state of a training run on disk, so that the run can be interrupted at any time."""

from __future__ import annotations

import pickle
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from baton.core.errors import ConfigError
from baton.core.files import replacing
from baton.train.option_names import what_differs

_ADVICE = "Delete it to start from the beginning."


@dataclass(slots=True)
class TrainingState:
    """The state of a training run.

    Attributes:
        epoch: epoch of the next batch.
        next_batch: index of the next batch in its epoch.
        num_steps: number of optimizer steps so far.
        elapsed_s: working time so far, of all parts of an interrupted run together.
        started_s: value of ``elapsed_s`` before the first step.
        num_rows: answer tokens trained on so far, counted again in each epoch.
        log: reports and evaluations so far.
    """

    epoch: int = 0
    next_batch: int = 0
    num_steps: int = 0
    elapsed_s: float = 0.0
    started_s: float = 0.0
    num_rows: int = 0
    log: list[dict[str, Any]] = field(default_factory=list)


def save_state(path: Path, identity: dict[str, Any], state: TrainingState, weights: dict[str, Any]) -> None:
    """Replaces the file atomically.

    Args:
        identity: everything that the run depends on; only a run with the same identity can resume it.
        weights: the optimizer's state.
    """
    with replacing(path, also=(RuntimeError,)) as temporary:
        torch.save({"identity": identity, "state": asdict(state), "optimizer": weights}, temporary)


def load_state(path: Path, identity: dict[str, Any]) -> tuple[TrainingState, dict[str, Any]] | None:
    """Loads what :func:`save_state` wrote last; ``None`` if there is no file.

    Raises:
        ConfigError: the file cannot be read, or belongs to another run; the message names what differs.
    """
    if not path.exists():
        return None
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
        stored = content["identity"]
        state = TrainingState(**content["state"])
        optimizer: dict[str, Any] = content["optimizer"]
    except pickle.UnpicklingError as error:  # its message is not meant for users
        raise ConfigError(f"training: {path} is not the state of a training run. {_ADVICE}") from error
    except (OSError, RuntimeError, LookupError, TypeError, EOFError) as error:
        raise ConfigError(f"training: {path} cannot be read: {error}. {_ADVICE}") from error
    if stored != identity:
        raise ConfigError(
            f"training: {path} belongs to a run with other options: {what_differs(stored, identity)}. Give the same "
            "options to resume it, name another folder with --work, or delete the file to start from the "
            "beginning."
        )
    return state, optimizer
