"""Lists in options of ``baton bench``."""

from __future__ import annotations

import pytest

from baton.core.errors import ConfigError
from cluster.cli.cli_bench import integers, names, numbers


def test_lists_are_read_without_repetitions() -> None:
    assert names(" a, b,,a") == ("a", "b")
    assert integers("--batches", "1, 4") == (1, 4)
    assert numbers("--temperatures", "0,0.8,1e-3") == (0.0, 0.8, 0.001)
    assert numbers("--rate", "") == ()


@pytest.mark.parametrize("text", ["nan", "0,inf", "-inf", "1e400", "NaN,1", "0.8,warm"])
def test_what_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--temperatures takes numbers .* got '"):
        numbers("--temperatures", text)


@pytest.mark.parametrize("text", ["1.5", "inf", "two"])
def test_what_is_no_whole_number_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--batches takes whole numbers"):
        integers("--batches", text)
