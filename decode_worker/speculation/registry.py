"""Names of the speculation methods. Registration is this table, nothing else."""

from __future__ import annotations

from decode_worker.speculation.controller import AUTO, NONE, SpeculationController
from decode_worker.speculation.ngram import NgramProposer
from decode_worker.speculation.suffix import SuffixProposer
from engine.errors import ConfigError
from engine.verification import Proposer

_METHODS = ("ngram", "suffix")
# What `auto` chooses from; n-grams are a special case of suffixes.
_AUTO_METHODS = ("suffix",)


def method_names() -> tuple[str, ...]:
    """What a request or a configuration may ask for."""
    return (AUTO, NONE, *sorted(_METHODS))


def create_controller(default: str, max_draft_tokens: int, *, remember_outputs: bool) -> SpeculationController:
    """All methods, each at a request's choice.

    Raises:
        ConfigError: ``default`` is not a known name.
    """
    if default not in method_names():
        raise ConfigError(f"decode.speculation.method is {default!r}; known are: {', '.join(method_names())}.")
    methods: dict[str, Proposer] = {
        "ngram": NgramProposer(),
        "suffix": SuffixProposer(remembers_outputs=remember_outputs),
    }
    return SpeculationController(methods, _AUTO_METHODS, default, max_draft_tokens)
