"""Texts of options: durations are read as those of the configuration."""

import pytest

from baton.core.config_section import parse_duration_s
from baton.core.errors import ConfigError
from baton.core.option_text import duration_s, integers, is_host_and_port, names, numbers


@pytest.mark.parametrize("text", ["500ms", "2s", "1.5 s", ".5s", "10min", "10m", "1h", "250us", "3", "2S"])
def test_durations_are_equal_in_options_and_configuration(text):
    assert duration_s("--slo", text) == parse_duration_s(text)


@pytest.mark.parametrize("text", ["", "s", "2 weeks", "-1s", "1e3s", "1.2.3s"])
def test_options_and_configuration_refuse_the_same_durations(text):
    with pytest.raises(ConfigError, match="is not a duration above 0"):
        duration_s("--slo", text)
    with pytest.raises(ValueError, match="is not a duration of at most a day"):
        parse_duration_s(text)


def test_lists_are_read_without_duplicates():
    assert names(" a, b,,a") == ("a", "b")
    assert integers("--batches", "1, 4") == (1, 4)
    assert numbers("--temperatures", "0,0.8,1e-3") == (0.0, 0.8, 0.001)
    assert numbers("--rate", "") == ()


@pytest.mark.parametrize("text", ["nan", "0,inf", "-inf", "1e400", "NaN,1", "0.8,warm"])
def test_a_value_that_is_not_a_number_is_refused(text):
    with pytest.raises(ConfigError, match=r"--temperatures must be numbers .* got '"):
        numbers("--temperatures", text)


@pytest.mark.parametrize("text", ["1.5", "inf", "two"])
def test_a_value_that_is_not_a_whole_number_is_refused(text):
    with pytest.raises(ConfigError, match="--batches must be whole numbers"):
        integers("--batches", text)


@pytest.mark.parametrize("text", ["head:1", "10.0.0.1:65535", "[::1]:6379", "a-b.example:80"])
def test_addresses_with_a_port(text):
    assert is_host_and_port(text)


@pytest.mark.parametrize("text", ["head", "head:", ":80", "head:0", "head:65536", "head:123456", "a b:80", "ray://a:1"])
def test_other_texts_are_no_addresses(text):
    assert not is_host_and_port(text)
