"""The speculation methods by name, and how a worker's controller and verifier are put together.

A method is registered by its entry in :data:`METHODS`, or in :func:`_network_method` if it drafts with a network.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from baton.core.errors import ConfigError
from baton.core.roles import DRAFT_METHODS
from baton.engine.contracts import Verifier
from baton.engine.draft.eagle.feature_state import FeatureState
from baton.engine.draft.loading import LoadedDraft, create_draft_state
from baton.engine.draft.medusa.medusa_state import MedusaState
from baton.engine.draft.model.token_state import TokenState
from baton.engine.draft.references import check_method
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.scheduling.step_cost_model import StepCostModel
from cluster.config.worker_config import SpeculationConfig
from decode_worker.speculation.controller import AUTO, NONE, RegisteredMethod, SpeculationController
from decode_worker.speculation.draft_length import DraftPasses
from decode_worker.speculation.draft_model import DraftModelProposer
from decode_worker.speculation.eagle.proposer import EagleProposer
from decode_worker.speculation.eagle.tree_drafter import TreeSettings
from decode_worker.speculation.forced import ForcedTokens
from decode_worker.speculation.lookahead import LookaheadProposer, LookaheadSettings
from decode_worker.speculation.medusa import MedusaProposer
from decode_worker.speculation.method import DraftMethod
from decode_worker.speculation.ngram import NgramProposer
from decode_worker.speculation.shadow import ShadowDrafts
from decode_worker.speculation.suffix import SuffixProposer
from decode_worker.speculation.verification import RESIDUAL, create_verifier

GRAMMAR = "grammar"
"""The name, in statistics, of drafts of tokens that a grammar forces."""

METHODS: dict[str, Callable[[SpeculationConfig], RegisteredMethod]] = {
    "lookahead": lambda config: RegisteredMethod(
        LookaheadProposer(LookaheadSettings(window=config.lookahead_window)),
        config.max_tree_tokens,
        is_verified_whole=True,
    ),
    "ngram": lambda config: RegisteredMethod(NgramProposer(), config.chain_tokens("ngram")),
    # N-grams are a special case of suffixes, so that `auto` tries suffixes only.
    "suffix": lambda config: RegisteredMethod(
        SuffixProposer(remembers_outputs=config.remember_outputs), config.chain_tokens("suffix"), is_automatic=True
    ),
}
"""Methods without a network."""


def _network_method(
    draft: LoadedDraft, runner: ModelRunner, costs: StepCostModel, config: SpeculationConfig
) -> RegisteredMethod:
    """The method of a network. ``auto`` uses it where it promises more than the methods without one."""
    state, passes, draws = create_draft_state(draft.network, runner), DraftPasses(costs), config.acceptance == RESIDUAL
    method: DraftMethod
    if isinstance(state, FeatureState):
        max_tokens = max_chain = config.chain_tokens("eagle" if draft.method == "eagle" else "eagle3")
        trees = None
        if config.tree_max_batch and not draws:
            max_tokens = config.max_tree_tokens
            trees = TreeSettings(max_nodes=max_tokens, max_batch=config.tree_max_batch, max_chain=max_chain)
        method = EagleProposer(state, passes, draws=draws, trees=trees)
    elif isinstance(state, MedusaState):
        method, max_tokens = MedusaProposer(state, passes), config.max_tree_tokens
    elif isinstance(state, TokenState):
        method, max_tokens = DraftModelProposer(state, passes, draws=draws), config.chain_tokens("draft_model")
    else:
        raise TypeError(f"there is no speculation method for {type(state).__name__}")
    return RegisteredMethod(method, max_tokens, is_automatic=True, passes=passes, state=state)


def method_names() -> tuple[str, ...]:
    """The names that requests and configurations may use. Methods with a network need a draft of their kind."""
    return (AUTO, NONE, *sorted((*METHODS, *DRAFT_METHODS)))


def create_controller(
    config: SpeculationConfig, runner: ModelRunner, draft: LoadedDraft | None, *, default: str | None = None
) -> SpeculationController:
    """All methods that can run here. Each request may choose one.

    Args:
        runner: built with ``draft``.
        default: method of requests that do not choose; ``None`` takes the configured one.

    Raises:
        ConfigError: the default is not a known name, or needs a draft that was not loaded.
    """
    default = default or config.method
    if default not in method_names():
        raise ConfigError(f"speculation.method is {default!r}; expected one of: {', '.join(method_names())}.")
    check_method(default, None if draft is None else draft.method, None if draft is None else draft.name)
    costs = StepCostModel()
    methods = {GRAMMAR: RegisteredMethod(ForcedTokens(), config.max_draft_tokens, joins_others=True)}
    methods |= {name: create(config) for name, create in METHODS.items()}
    if draft is not None:
        methods[draft.method] = _network_method(draft, runner, costs, config)
    return SpeculationController(methods, default, costs, _shadow_of(config, draft))


def _shadow_of(config: SpeculationConfig, draft: LoadedDraft | None) -> ShadowDrafts | None:
    if config.shadow is None:
        return None
    method, name = (None, None) if draft is None else (draft.method, draft.name)
    check_method(config.shadow, method, name, "speculation.shadow")
    return ShadowDrafts(config.shadow, config.shadow_share)


@dataclass(frozen=True, slots=True)
class Speculation:
    """A worker's verifier and controller.

    Attributes:
        max_draft_tokens: room that the engine must keep for drafts, per sequence and step.
    """

    verifier: Verifier
    controller: SpeculationController
    max_draft_tokens: int


def assemble_speculation(
    config: SpeculationConfig, runner: ModelRunner, draft: LoadedDraft | None, *, default: str | None = None
) -> Speculation:
    """A verifier, and a controller as of :func:`create_controller`, which takes the same arguments."""
    return Speculation(
        create_verifier(config.acceptance, config.typical_epsilon, config.typical_alpha),
        create_controller(config, runner, draft, default=default),
        config.largest_draft,
    )
