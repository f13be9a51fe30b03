"""Names of the speculation methods, and how they are put together. Registration is these tables, nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from baton.core.errors import ConfigError
from baton.engine.contracts import Proposer
from baton.engine.draft.eagle.feature_state import FeatureState
from baton.engine.draft.loading import LoadedDraft
from baton.engine.draft.medusa.medusa_state import MedusaState
from baton.engine.draft.model.token_state import TokenState
from baton.engine.draft.network import DraftState
from baton.engine.draft.references import DRAFT_METHODS, check_method
from baton.engine.draft.states import create_draft_state
from baton.engine.runner.model_runner import ModelRunner
from decode_worker.speculation.controller import AUTO, NONE, NetworkMethod, SpeculationController
from decode_worker.speculation.draft_length import DraftPasses, NetworkProposer
from decode_worker.speculation.draft_model import DraftModelProposer
from decode_worker.speculation.eagle import EagleProposer
from decode_worker.speculation.eagle_tree import EagleTreeProposer, EagleTreeSettings
from decode_worker.speculation.lookahead import LookaheadProposer
from decode_worker.speculation.medusa import MedusaProposer
from decode_worker.speculation.ngram import NgramProposer
from decode_worker.speculation.step_cost import StepCost
from decode_worker.speculation.suffix import SuffixProposer

_MODEL_FREE = ("lookahead", "ngram", "suffix")
# What `auto` tries before a network; n-grams are a special case of suffixes.
_AUTO_METHODS = ("suffix",)
# Its drafts hold the window that the next ones come from.
_WHOLE = ("lookahead",)


@dataclass(frozen=True, slots=True)
class SpeculationLimits:
    """
    Attributes:
        max_draft_tokens: of a chain.
        max_tree_tokens: of a tree.
        tree_max_batch: sequences in a step up to which EAGLE heads draft trees; 0 for never.
        draws: sampled requests get drafts that are drawn from the network's distribution.
        remember_outputs: lets ``suffix`` draft from the outputs of other requests.
    """

    max_draft_tokens: int = 8
    max_tree_tokens: int = 16
    tree_max_batch: int = 0
    draws: bool = False
    remember_outputs: bool = False


def method_names() -> tuple[str, ...]:
    """What a request or a configuration may ask for; those with a network only where such a draft is loaded."""
    return (AUTO, NONE, *sorted((*_MODEL_FREE, *DRAFT_METHODS)))


def create_controller(
    default: str, limits: SpeculationLimits, runner: ModelRunner, draft: LoadedDraft | None
) -> SpeculationController:
    """All methods that can run here, each at a request's choice.

    Raises:
        ConfigError: ``default`` is not a known name, or needs a draft that was not loaded.
    """
    _check_available(default, draft)
    cost = StepCost()
    methods: dict[str, Proposer] = {
        "lookahead": LookaheadProposer(),
        "ngram": NgramProposer(),
        "suffix": SuffixProposer(remembers_outputs=limits.remember_outputs),
    }
    most = {"lookahead": limits.max_tree_tokens}
    network = None
    if draft is not None:
        network = _create_network(draft, runner, cost, limits)
        if isinstance(network.proposer, EagleTreeProposer | MedusaProposer):
            most[network.name] = limits.max_tree_tokens
    return SpeculationController(methods, _AUTO_METHODS, default, limits.max_draft_tokens, most, cost, network, _WHOLE)


def _check_available(default: str, draft: LoadedDraft | None) -> None:
    if default not in method_names():
        raise ConfigError(f"speculation.method is {default!r}; known are: {', '.join(method_names())}.")
    check_method(default, None if draft is None else draft.method, None if draft is None else draft.name)


def _create_network(
    draft: LoadedDraft, runner: ModelRunner, cost: StepCost, limits: SpeculationLimits
) -> NetworkMethod:
    passes = DraftPasses(cost)
    state = create_draft_state(draft.network, runner)
    return NetworkMethod(draft.method, _create_proposer(state, passes, limits), state, passes)


def _create_proposer(state: DraftState, passes: DraftPasses, limits: SpeculationLimits) -> NetworkProposer:
    if isinstance(state, FeatureState):
        return _create_eagle(state, passes, limits)
    if isinstance(state, MedusaState):
        return MedusaProposer(state, passes)
    if isinstance(state, TokenState):
        return DraftModelProposer(state, passes, draws=limits.draws)
    raise TypeError(f"no speculation method is known for {type(state).__name__}")


def _create_eagle(state: FeatureState, passes: DraftPasses, limits: SpeculationLimits) -> NetworkProposer:
    chains = EagleProposer(state, passes, draws=limits.draws)
    if not limits.tree_max_batch or limits.draws:
        return chains
    settings = EagleTreeSettings(
        max_nodes=limits.max_tree_tokens, max_batch=limits.tree_max_batch, max_chain=limits.max_draft_tokens
    )
    return EagleTreeProposer(state, passes, chains, settings)
