"""What each key of the configuration needs to take effect, and the plan of an upgrade."""

from __future__ import annotations

from typing import Any

import pytest

from baton.core.errors import ConfigError
from baton.core.roles import POOLS
from cluster.config import key_changes
from cluster.config.config import BatonConfig
from cluster.config.key_changes import Need, changed_keys, how_to_change, need_of, plan_upgrade, worker_keys

RUNNING = BatonConfig()


def changed(values: dict[str, Any]) -> BatonConfig:
    return BatonConfig.from_dict(values)


def keys(values: Any, prefix: str = "") -> list[str]:
    if not isinstance(values, dict) or not values:
        return [prefix]
    return [key for name, each in values.items() for key in keys(each, f"{prefix}.{name}" if prefix else name)]


def test_every_key_has_a_need() -> None:
    found = keys(RUNNING.to_dict())
    assert len(found) > 100
    assert all(need_of(key) in Need for key in found)
    with pytest.raises(KeyError):
        need_of("verify.workers")


def test_a_hint_says_how_its_keys_can_be_changed() -> None:
    running = "`baton upgrade --set`, while the cluster runs."
    restart = "`baton down` and `baton up --set`, since `baton upgrade` refuses it."
    assert how_to_change("Raise prefill.chunk_tokens, or") == f"To change prefill.chunk_tokens: {running}"
    assert how_to_change("routing.local_prefill: never keeps") == f"To change routing.local_prefill: {restart}"
    both = how_to_change("Raise decode.kv_blocks, or use routing.local_prefill: never. decode.kv_blocks is")
    assert both == f"To change decode.kv_blocks: {running} routing.local_prefill: {restart}"
    assert how_to_change("See docs/admission.md and baton_admission_refusals_total.") == ""


def test_every_rule_is_about_a_key_or_a_section() -> None:
    known = keys(RUNNING.to_dict())
    stale = [rule for rule in key_changes._RULES if not any(f"{key}.".startswith(f"{rule}.") for key in known)]
    assert stale == []


@pytest.mark.parametrize(
    ("values", "replaced"),
    [
        ({"prefill": {"chunk_tokens": 64}}, {"prefill": ["prefill.chunk_tokens"], "decode": []}),
        ({"speculation": {"max_tree_tokens": 9}}, {"prefill": [], "decode": ["speculation.max_tree_tokens"]}),
        ({"speculation": {"method": "medusa"}}, {"prefill": ["speculation.method"], "decode": ["speculation.method"]}),
        ({"decode": {"resources": {"labels": {"a": "b"}}}}, {"prefill": [], "decode": ["decode.resources.labels.a"]}),
        ({"model": "/m"}, {"prefill": ["model"], "decode": ["model"]}),
        ({"decode": {"workers": 3}, "slo": {"default": "batch"}}, {"prefill": [], "decode": []}),
    ],
)
def test_workers_are_replaced_only_where_a_key_of_theirs_changes(values, replaced) -> None:
    new = changed(values)
    plan = plan_upgrade(RUNNING, new)
    found = {pool: [key for key in keys if key != "decode.resources.labels"] for pool, keys in plan.workers.items()}
    assert found == replaced
    assert {pool: bool(worker_keys(RUNNING, new, pool)) for pool in POOLS} == {
        pool: bool(keys) for pool, keys in replaced.items()
    }


def test_sizes_and_keys_that_take_effect_at_once_replace_nothing() -> None:
    plan = plan_upgrade(RUNNING, changed({"decode": {"workers": 3}, "slo": {"default": "batch"}}))
    assert (plan.sizes, plan.at_once, plan.changes) == ({"decode": 3}, ["slo.default"], True)
    assert plan.texts() == [
        "decode.workers: 1 → 3",
        "slo.default: standard → batch",
        "prefill: workers are not touched",
        "decode: workers are not touched; scaled to 3",
        "at once: slo.default",
    ]
    nothing = plan_upgrade(RUNNING, changed({}))
    assert (nothing.changes, changed_keys(RUNNING, RUNNING)) == (False, [])


def test_all_refused_keys_are_named_with_what_to_do() -> None:
    with pytest.raises(ConfigError) as raised:
        plan_upgrade(RUNNING, changed({"router": {"port": 9, "max_inflight": 3}, "engine": {"threads": 1}}))
    lines = raised.value.message.splitlines()
    assert len(lines) == 3
    assert lines[1].startswith("router.max_inflight: 1024 → 3; only a router that starts reads it")
    assert "baton down" in lines[1]
    assert lines[2].startswith("router.port: 8000 → 9; processes that differ in it")
