"""The description of the speculation methods names each of them and says which can run."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import get_args

from baton.core.roles import BUNDLED_DRAFTS, DRAFT_METHODS, SpeculationMethod
from cluster.gateway.speculation_methods import SPECULATION_METHODS, describe_methods
from tests.tiny_tokenizers import byte_level_tokenizer
from tests.unit.cluster.fakes import FakeGenerator

TUNE_PAGE = Path(__file__).parents[4] / "docs" / "tune" / "speculation.md"
CARD = FakeGenerator(byte_level_tokenizer(), lambda _: ()).model


def test_every_method_is_described_once() -> None:
    names = [card.method for card in SPECULATION_METHODS]
    assert sorted([*names, "auto", "none"]) == sorted(get_args(SpeculationMethod))


def test_methods_that_need_a_draft_say_which_setting_loads_it() -> None:
    for card in SPECULATION_METHODS:
        assert bool(card.draft) == (card.method in DRAFT_METHODS)


def test_drafts_of_the_default_model_go_by_the_names_of_their_methods() -> None:
    named = {card.method: card.draft for card in SPECULATION_METHODS if "with the default model" in card.draft}
    assert set(named) == set(BUNDLED_DRAFTS)
    assert all(draft.startswith(f"{method} (") for method, draft in named.items())


def test_the_page_about_choosing_one_has_every_method() -> None:
    table = TUNE_PAGE.read_text(encoding="utf-8").partition("## In what order")[0]
    first_cells = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    named = [name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(named) == sorted(card.method for card in SPECULATION_METHODS)


def test_a_method_is_available_if_its_draft_is_loaded() -> None:
    def available(*loaded: str) -> set[str]:
        listed = describe_methods(replace(CARD, draft_methods=frozenset(loaded)))["data"]
        return {entry["method"] for entry in listed if entry["available"]}

    assert available() == {"ngram", "suffix", "lookahead"}
    assert available("eagle3") == {"ngram", "suffix", "lookahead", "eagle3"}
