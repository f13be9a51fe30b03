"""The description of the speculation methods names each of them and says which can run."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

from baton.core.roles import DRAFT_METHODS, SpeculationMethod
from cluster.gateway.speculation_methods import SPECULATION_METHODS, describe_methods
from tests.tiny_tokenizers import byte_level_tokenizer
from tests.unit.cluster.fakes import FakeGenerator

CARD = FakeGenerator(byte_level_tokenizer(), lambda _: ()).model


def test_every_method_is_described_once() -> None:
    names = [card.method for card in SPECULATION_METHODS]
    assert sorted([*names, "auto", "none"]) == sorted(get_args(SpeculationMethod))


def test_methods_that_need_a_draft_say_which_setting_loads_it() -> None:
    for card in SPECULATION_METHODS:
        assert bool(card.draft) == (card.method in DRAFT_METHODS)


def test_a_method_is_available_if_its_draft_is_loaded() -> None:
    def available(*loaded: str) -> set[str]:
        listed = describe_methods(replace(CARD, draft_methods=frozenset(loaded)))["data"]
        return {entry["method"] for entry in listed if entry["available"]}

    assert available() == {"ngram", "suffix", "lookahead"}
    assert available("eagle3") == {"ngram", "suffix", "lookahead", "eagle3"}
