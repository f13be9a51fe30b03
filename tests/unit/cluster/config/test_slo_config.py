"""The section ``slo``: durations, overrides of the built-in classes, and errors that say what to do."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.config_section import format_duration, parse_duration_s
from baton.core.errors import ConfigError
from baton.core.slo import BATCH, BUILTIN_CLASSES, INTERACTIVE, STANDARD
from cluster.config.config import BatonConfig, load_config


def config(**slo: object) -> BatonConfig:
    return BatonConfig.from_dict({"slo": slo})


def test_the_defaults_are_the_built_in_classes() -> None:
    classes = BatonConfig().slo.to_classes()
    assert classes.all == BUILTIN_CLASSES
    assert classes.choose(None, None) == STANDARD
    assert (classes.choose(None, "flex"), classes.choose(None, "priority")) == (BATCH, INTERACTIVE)


def test_given_values_override_the_built_in_ones() -> None:
    classes = {
        "interactive": {"ttft": "200ms"},
        "gold": {"ttft": "100ms", "tpot": 0.01, "percentile": 99},
        "batch": None,
    }
    found = {slo.name: slo for slo in config(classes=classes, default="gold").slo.to_classes().all}
    assert (found["interactive"].ttft_s, found["interactive"].tpot_s) == (0.2, INTERACTIVE.tpot_s)
    assert (found["gold"].ttft_s, found["gold"].tpot_s, found["gold"].percentile) == (0.1, 0.01, 99.0)
    assert (found["batch"], found["standard"]) == (BATCH, STANDARD)


def test_one_value_can_come_from_the_command_line() -> None:
    found = load_config(None, {"slo.classes.interactive.tpot": "20ms"}).slo.classes["interactive"]
    assert (found.tpot, found.ttft) == (0.02, 1.0)


def test_a_class_named_like_a_built_in_tier_replaces_it() -> None:
    classes = config(
        classes={"flex": {"ttft": "1s", "tpot": "10ms"}}, service_tiers={"batch": "batch"}
    ).slo.to_classes()
    assert classes.choose(None, "flex").name == "flex"
    found = config(classes={"flex": {"ttft": "1s", "tpot": "10ms"}})
    assert found.slo.to_classes().choose(None, "flex").name == "flex"
    assert found.slo.to_classes().choose(None, "priority") == INTERACTIVE
    assert BatonConfig.from_dict(found.to_dict()) == found


def test_the_configuration_of_slos_can_be_sent_to_an_actor() -> None:
    before = config(classes={"gold": {"ttft": "1ms", "tpot": 1 / 3}}, service_tiers={"scale": "gold"})
    assert BatonConfig.from_dict(json.loads(json.dumps(before.to_dict()))) == before


@pytest.mark.parametrize(
    ("slo", "expected"),
    [
        (
            {"classes": {"gold": {"ttft": "1s"}}},
            "'gold' is not a built-in class (interactive, standard, batch), and a new class needs tpot",
        ),
        (
            {"classes": {"batch": {"tftt": "1s"}}},
            "Did you mean slo.classes.batch.ttft? Known keys in slo.classes.batch:",
        ),
        ({"classes": {"batch": {"ttft": "1 week"}}}, "slo.classes.batch.ttft: '1 week' is not a duration"),
        ({"classes": {"batch": {"ttft": "0s"}}}, "'0s' is too short; the minimum is 1ms"),
        ({"classes": {"batch": {"ttft": True}}}, "'True' is not a duration"),
        ({"classes": {"batch": {"ttft": None}}}, "'None' is not a duration"),
        ({"classes": {"batch": {"queue_deadline": "-1s"}}}, "'-1s' is not a duration"),
        (
            {"classes": {"batch": {"percentile": 0.95}}},
            "slo.classes.batch.percentile must be greater than or equal to 1",
        ),
        ({"classes": {"interactiv": {"ttft": "1s"}}}, "needs tpot; did you mean 'interactive'?"),
        ({"classes": {"gold": None}}, "and a new class needs ttft and tpot."),
        ({"classes": {"batch": {"percentile": 101}}}, "must be less than or equal to 100"),
        ({"classes": {"batch": {"priority": 1.5}}}, "slo.classes.batch.priority must be a valid integer"),
        ({"classes": {"batch": 3}}, "slo.classes.batch must be a section with keys of its own, got 3."),
        ({"classes": ["batch"]}, "slo.classes must be a section with keys of its own"),
        ({"classes": {"Gold": {}}}, "'Gold' is not a valid class name; expected"),
        ({"classes": {"auto": {}}}, "'auto' is not a valid class name; expected"),
        ({"classes": {f"c{n}": {"ttft": 1, "tpot": 1} for n in range(20)}}, "at most 16 classes are allowed, got 23"),
        (
            {"default": "gold"},
            "slo: default is 'gold', which is not a class; choose one of interactive, standard, batch",
        ),
        ({"service_tiers": {"scale": "gold"}}, "service_tiers.scale is 'gold', which is not a class; choose one of"),
        ({"service_tiers": {"default": "batch"}}, "service_tiers cannot redefine default; set slo.default instead"),
        (
            {"service_tiers": {"batch": "interactive"}},
            "slo: service_tiers.batch is 'interactive', but batch is itself the name of a class; "
            "remove the tier, rename it, or change the targets in slo.classes.batch",
        ),
    ],
)
def test_a_wrong_section_is_explained(slo: dict[str, object], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**slo)
    assert expected in caught.value.message


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("500ms", 0.5), ("2s", 2.0), ("1.5 s", 1.5), ("10min", 600.0), ("1h", 3600.0), (3, 3.0), ("0s", 0.0)],
)
def test_durations_have_units(text: object, seconds: float) -> None:
    assert parse_duration_s(text) == seconds


@given(st.floats(0, 86_400))
def test_a_written_duration_reads_back_unchanged(seconds: float) -> None:
    seconds = round(seconds, 6)
    assert parse_duration_s(format_duration(seconds)) == seconds
