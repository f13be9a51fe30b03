"""Which state belongs to which network."""

from __future__ import annotations

from engine.draft.eagle import EagleHead
from engine.draft.feature_state import FeatureState
from engine.draft.network import DraftNetwork, DraftState
from engine.model_runner import ModelRunner


def create_draft_state(network: DraftNetwork, runner: ModelRunner) -> DraftState:
    """The state of a network on one worker.

    Args:
        runner: of the target, built with ``network`` as its draft.

    Raises:
        TypeError: a network of an unknown kind.
    """
    if isinstance(network, EagleHead):
        return FeatureState(network, runner)
    raise TypeError(f"no state is known for {type(network).__name__}")
