"""Texts of options: durations are read as those of the configuration."""

import pytest

from baton.bench.option_text import duration_s
from baton.core.config_section import parse_duration_s
from baton.core.errors import ConfigError


@pytest.mark.parametrize("text", ["500ms", "2s", "1.5 s", ".5s", "10min", "10m", "1h", "250us", "3", "2S"])
def test_a_duration_is_the_same_in_options_and_in_the_configuration(text):
    assert duration_s("--slo", text) == parse_duration_s(text)


@pytest.mark.parametrize("text", ["", "s", "2 weeks", "-1s", "1e3s", "1.2.3s"])
def test_what_is_no_duration_is_none_in_either(text):
    with pytest.raises(ConfigError, match="is not a duration over 0"):
        duration_s("--slo", text)
    with pytest.raises(ValueError, match="is no duration"):
        parse_duration_s(text)
