"""Which state belongs to which network."""

from __future__ import annotations

from baton.engine.contracts import DraftNetwork
from baton.engine.draft.eagle.feature_state import FeatureState
from baton.engine.draft.eagle.head import EagleHead
from baton.engine.draft.medusa.heads import MedusaHeads
from baton.engine.draft.medusa.medusa_state import MedusaState
from baton.engine.draft.model.draft_model import DraftModel
from baton.engine.draft.model.token_state import TokenState
from baton.engine.draft.network import DraftState
from baton.engine.runner.model_runner import ModelRunner


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
