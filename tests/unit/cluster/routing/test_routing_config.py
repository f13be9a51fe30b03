"""The section ``routing``: overrides of the defaults, and refused values."""

from __future__ import annotations

import pytest

from baton.core.errors import ConfigError
from cluster.config.config import BatonConfig, load_config
from cluster.routing.filters import FILTERS
from cluster.routing.routing_config import DEFAULT_WEIGHTS
from cluster.routing.scorers import SCORERS


def test_the_defaults_name_every_scorer_and_filter() -> None:
    routing = BatonConfig().routing
    assert dict(routing.scorers) == dict(DEFAULT_WEIGHTS)
    assert set(routing.scorers) == set(SCORERS)
    assert routing.filters == list(FILTERS)
    assert BatonConfig.from_dict(BatonConfig().to_dict()).routing == routing


def test_one_weight_can_be_set_on_the_command_line() -> None:
    scorers = load_config(None, {"routing.scorers.slo_headroom": 0}).routing.scorers
    assert scorers == {**DEFAULT_WEIGHTS, "slo_headroom": 0}


@pytest.mark.parametrize(
    ("routing", "message"),
    [
        ({"scorers": {"kv_usage": 1}}, r"routing\.scorers: unknown scorer 'kv_usage'\. Did you mean kv_use\?"),
        ({"scorers": {"kv_use": -1}}, r"routing\.scorers\.kv_use must be greater than or equal to 0, got -1"),
        ({"scorers": dict.fromkeys(SCORERS, 0)}, "no scorer has a weight above 0"),
        ({"scorers": [1]}, r"routing\.scorers must be a section"),
        ({"picker": "best"}, r"routing\.picker: unknown picker 'best'\. Did you mean best_score\?"),
        ({"filters": ["accepting", "hasroom"]}, r"unknown filter 'hasroom'\. Did you mean has_room\?"),
        ({"filters": ["untried"]}, "the filter accepting is missing"),
        ({"filters": ["accepting", "untried", "untried"]}, "the filter untried is listed more than once"),
        ({"local_prefill": "maybe"}, r"routing\.local_prefill must be 'auto', 'never' or 'always'"),
        ({"scan_limit": 0}, r"routing\.scan_limit must be greater than or equal to 1"),
        ({"sampel": 3}, r"unknown key routing\.sampel\. Did you mean routing\.sample\?"),
    ],
)
def test_wrong_names_are_refused_with_the_nearest_right_one(routing: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BatonConfig.from_dict({"routing": routing})


def test_filters_are_applied_in_a_fixed_order() -> None:
    """A worker with room that takes no requests must not be the only one that has_room leaves."""
    named = BatonConfig.from_dict({"routing": {"filters": ["has_room", "accepting"]}}).routing
    assert named.filters == ["accepting", "has_room"]
