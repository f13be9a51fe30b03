"""Names of the speculation methods, and how they are put together. Registration is these tables, nothing else."""

from __future__ import annotations

from collections.abc import Callable

from decode_worker.speculation.controller import AUTO, NONE, NetworkMethod, SpeculationController
from decode_worker.speculation.draft_length import DraftPasses
from decode_worker.speculation.eagle import EagleProposer
from decode_worker.speculation.ngram import NgramProposer
from decode_worker.speculation.step_cost import StepCost
from decode_worker.speculation.suffix import SuffixProposer
from engine.draft.eagle import EagleHead
from engine.draft.feature_state import FeatureState
from engine.draft.loading import LoadedDraft
from engine.draft.network import DraftState
from engine.errors import ConfigError
from engine.model_runner import ModelRunner
from engine.verification import Proposer

_MODEL_FREE = ("ngram", "suffix")
_NETWORKS = ("draft_model", "eagle", "eagle3", "medusa")
# What `auto` tries before a network; n-grams are a special case of suffixes.
_AUTO_METHODS = ("suffix",)


def method_names() -> tuple[str, ...]:
    """What a request or a configuration may ask for; those with a network only where such a draft is loaded."""
    return (AUTO, NONE, *sorted((*_MODEL_FREE, *_NETWORKS)))


def create_controller(
    default: str, max_draft_tokens: int, runner: ModelRunner, draft: LoadedDraft | None, *, remember_outputs: bool
) -> SpeculationController:
    """All methods that can run here, each at a request's choice.

    Raises:
        ConfigError: ``default`` is not a known name, or needs a draft that was not loaded.
    """
    cost = StepCost()
    network = None if draft is None else _create_network(draft, runner, cost)
    available = {AUTO, NONE, *_MODEL_FREE, *([] if draft is None else [draft.method])}
    if default not in method_names():
        raise ConfigError(f"speculation.method is {default!r}; known are: {', '.join(method_names())}.")
    if default not in available:
        loaded = "no draft is loaded" if draft is None else f"{draft.name} is for the method {draft.method}"
        raise ConfigError(f"speculation.method is {default}, but {loaded}. Set speculation.draft to such a checkpoint.")
    methods: dict[str, Proposer] = {
        "ngram": NgramProposer(),
        "suffix": SuffixProposer(remembers_outputs=remember_outputs),
    }
    return SpeculationController(methods, _AUTO_METHODS, default, max_draft_tokens, cost, network)


def _create_network(draft: LoadedDraft, runner: ModelRunner, cost: StepCost) -> NetworkMethod:
    passes = DraftPasses(cost)
    create: dict[str, Callable[[], tuple[Proposer, DraftState]]] = {
        "eagle": lambda: _eagle(draft, runner, passes),
        "eagle3": lambda: _eagle(draft, runner, passes),
    }
    proposer, state = create[draft.method]()
    return NetworkMethod(draft.method, proposer, state, passes)


def _eagle(draft: LoadedDraft, runner: ModelRunner, passes: DraftPasses) -> tuple[Proposer, DraftState]:
    if not isinstance(draft.network, EagleHead):
        raise TypeError(f"{type(draft.network).__name__} is no EAGLE head")
    state = FeatureState(draft.network, runner)
    return EagleProposer(state, passes), state
