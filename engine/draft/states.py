"""Which state belongs to which network."""

from __future__ import annotations

from engine.draft.draft_model import DraftModel
from engine.draft.eagle import EagleHead
from engine.draft.feature_state import FeatureState
from engine.draft.medusa import MedusaHeads
from engine.draft.medusa_state import MedusaState
from engine.draft.network import DraftNetwork, DraftState
from engine.draft.token_state import TokenState
from engine.model_runner import ModelRunner


def create_draft_state(network: DraftNetwork, runner: ModelRunner, *, ships_prompts: bool = False) -> DraftState:
    """The state of a network on one worker.

    Args:
        runner: of the target, built with ``network`` as its draft.
        ships_prompts: True on a worker that hands the KV of prompts over as soon as it is computed.

    Raises:
        TypeError: a network of an unknown kind.
    """
    if isinstance(network, EagleHead):
        return FeatureState(network, runner)
    if isinstance(network, MedusaHeads):
        return MedusaState(network, runner)
    if isinstance(network, DraftModel):
        return TokenState(network, runner, ships_prompts=ships_prompts)
    raise TypeError(f"no state is known for {type(network).__name__}")
