"""A configuration is shown as YAML from which it can be read again, and never with a secret."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from cluster.config.config import BatonConfig
from cluster.config.shown import shown_change, shown_config

KEY = "0123456789abcdef0123"


def test_the_whole_configuration_can_be_read_again() -> None:
    config = BatonConfig.from_dict({"decode": {"workers": 2}, "slo": {"default": "batch"}})
    assert BatonConfig.from_dict(yaml.safe_load(shown_config(config, is_whole=True))) == config


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"decode": {"workers": 2, "resources": {"labels": {"a": "b"}}}, "model": "/m"},
        {"slo": {"classes": {"standard": {"ttft": "9s", "tpot": "100ms"}}, "default": "standard"}},
    ],
)
def test_what_differs_from_the_defaults_gives_the_same_configuration(values: dict[str, Any]) -> None:
    config = BatonConfig.from_dict(values)
    shown = yaml.safe_load(shown_config(config, is_whole=False)) or {}
    assert BatonConfig.from_dict(shown) == config
    assert "engine" not in shown
    assert set(shown.get("decode", {})) == set(values.get("decode", {}))


def test_defaults_stand_behind_the_values_that_differ() -> None:
    config = BatonConfig.from_dict(
        {
            "model": "/m # x",
            "decode": {"workers": 7, "resources": {"labels": {"a": "b"}}},
            "served_model_name": ["m", "n"],
        }
    )
    shown = shown_config(config, is_whole=False)
    assert "  workers: 7  # default: 1\n" in shown
    assert "  labels:  # default: {}\n" in shown
    assert "served_model_name:  # default: null\n- m\n- n\n" in shown
    assert "'/m # x'  # default: " in shown
    whole = shown_config(config, is_whole=True)
    assert whole.count("# default: ") == shown.count("# default: ") == 4
    assert BatonConfig.from_dict(yaml.safe_load(whole)) == BatonConfig.from_dict(yaml.safe_load(shown)) == config


@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize(
    "database",
    [
        "postgresql://ada:hunter2@db:5432/jobs",
        "postgresql://ada:p@ss/hunter2@db/jobs",
        "postgresql://db/jobs?user=ada&password=hunter2&sslmode=require",
    ],
)
def test_secrets_are_never_shown(database: str, is_whole: bool) -> None:
    config = BatonConfig.from_dict(
        {"router": {"api_keys": [{"name": "ada", "key": KEY}]}, "jobs": {"database": database}}
    )
    shown = shown_config(config, is_whole=is_whole)
    digest = config.router.api_keys[0].key_sha256
    assert digest
    for secret in (KEY, digest, "hunter2", "p@ss"):
        assert secret not in shown
    for known in ("ada", "db", "jobs"):
        assert known in shown


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        (None, 64, "null → 64"),
        ("auto", "cpu", "auto → cpu"),
        ([], ["a", "b"], "[] → [a, b]"),
        ([{"key_sha256": "1"}], [{"key_sha256": "2"}], "changed"),
        ("postgresql://a:b@c/d", "postgresql://a:x@c/e", "postgresql://a:***@c/d → postgresql://a:***@c/e"),
        ("x" * 100, "y", f"{'x' * 59}… → y"),
    ],
)
def test_a_change_is_shown_in_short(before: object, after: object, text: str) -> None:
    assert shown_change(before, after) == text
