"""From the configuration to what an engine takes: a verifier and a controller over every method that can run."""

from __future__ import annotations

from dataclasses import dataclass

from baton.engine.contracts import Verifier
from baton.engine.draft.loading import LoadedDraft
from baton.engine.runner.model_runner import ModelRunner
from cluster.config.config import SpeculationConfig
from decode_worker.speculation.controller import SpeculationController
from decode_worker.speculation.registry import SpeculationLimits, create_controller
from decode_worker.speculation.verification import create_verifier


@dataclass(frozen=True, slots=True)
class Speculation:
    """
    Attributes:
        max_draft_tokens: what the engine must have room for, per sequence and step.
    """

    verifier: Verifier
    controller: SpeculationController
    max_draft_tokens: int


def assemble_speculation(
    config: SpeculationConfig, runner: ModelRunner, draft: LoadedDraft | None, *, method: str | None = None
) -> Speculation:
    """Puts together what the configuration asks for.

    Args:
        runner: built with ``draft``.
        method: of requests that do not choose; None takes the configured one.

    Raises:
        ConfigError: the method needs a draft that was not loaded.
    """
    limits = SpeculationLimits(
        max_draft_tokens=config.max_draft_tokens,
        max_tree_tokens=config.max_tree_tokens,
        tree_max_batch=config.tree_max_batch,
        draws=config.acceptance == "residual",
        remember_outputs=config.remember_outputs,
    )
    return Speculation(
        create_verifier(config.acceptance, config.typical_epsilon, config.typical_alpha),
        create_controller(method or config.method, limits, runner, draft),
        max(config.max_draft_tokens, config.max_tree_tokens),
    )
