"""Options of benchmarks: what cannot be measured is refused where it is said."""

from __future__ import annotations

import argparse

import pytest

from benchmarks.options import at_least, positive_number


@pytest.mark.parametrize(("text", "number"), [("2", 2), ("300", 300)])
def test_whole_numbers_from_the_minimum_are_accepted(text: str, number: int) -> None:
    assert at_least(2)(text) == number


@pytest.mark.parametrize("text", ["1", "-5", "2.5", "many", ""])
def test_other_values_are_refused_with_the_expected_range(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"whole number of at least 2, got {text!r}"):
        at_least(2)(text)


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "fast"])
def test_rates_must_be_positive(text: str) -> None:
    assert positive_number("5e6") == 5e6
    with pytest.raises(argparse.ArgumentTypeError, match="above 0"):
        positive_number(text)
