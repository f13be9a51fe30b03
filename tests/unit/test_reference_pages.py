"""The generated pages are current, and leave nothing unsaid."""

from __future__ import annotations

import pytest

from cluster.config.config import BatonConfig
from tests.reference_pages.configuration import keys
from tests.reference_pages.pages import FOLDER, PAGES


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_current(name: str) -> None:
    assert (FOLDER / name).read_text(encoding="utf-8") == PAGES[name](), "run: python -m tests.reference_pages"


def test_every_configuration_key_has_a_meaning() -> None:
    assert [key.path for key in keys(BatonConfig) if not key.meaning] == []


def test_every_leaf_of_the_defaults_is_on_the_page() -> None:
    def leaves(values: object, path: str = "") -> list[str]:
        if not isinstance(values, dict) or not values:
            return [path]
        return [leaf for key, value in values.items() for leaf in leaves(value, f"{path}.{key}" if path else key)]

    known = {key.path for key in keys(BatonConfig)}
    missing = [leaf for leaf in leaves(BatonConfig().to_dict()) if leaf not in known]
    mappings = ("routing.scorers.", "slo.classes.", "slo.service_tiers.")  # whose keys are names
    assert [leaf for leaf in missing if not leaf.startswith(mappings)] == []
