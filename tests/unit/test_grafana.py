"""The dashboard and the rules in ``deploy/grafana`` parse and refer only to existing series."""

from __future__ import annotations

import re
from itertools import combinations

import promql_parser
import pytest
import yaml

from baton.core.errors import error_classes
from tests.grafana import (
    FOLDER,
    Expression,
    Series,
    dashboard_expressions,
    load_dashboard,
    load_rules,
    problems,
    rule_expressions,
)
from tests.reference_pages.metrics import sample_page

DOCUMENTATION = FOLDER.parents[1] / "docs" / "observability.md"
PANELS = [panel for panel in load_dashboard()["panels"] if panel["type"] != "row"]


@pytest.fixture(scope="module")
def series() -> Series:
    """The series of a router with a worker in each pool."""
    return Series.of_page(sample_page())


def test_every_name_in_the_dashboard_exists(series: Series) -> None:
    assert problems(dashboard_expressions(), series) == []


def test_every_name_in_the_rules_exists(series: Series) -> None:
    assert problems(rule_expressions(), series) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("sum(rate(baton_made_up_total[5m]))", "baton_made_up_total does not exist"),
        ("baton_workers", None),
        ("sum by (worker) (baton_workers)", "groups by worker"),
        ('baton_workers{worker="decode-1"}', "has no label worker"),
        ('baton_workers{state="redy"}', "no state like redy"),
        ('baton_workers{state=~"ready|gone"}', "no state like ready|gone"),
        ('baton_workers{state=~"rea.*", job="x"}', None),
        ("rate(baton_workers[5m])", "is no counter"),
        ("max_over_time(baton_workers[5m])", None),
        ("rate(baton_queue_seconds_bucket[5m])", None),
        ("baton_queue_seconds", "does not exist"),
        ('-(baton_workers) / on (pool) sum by (pool) (baton_workers_target{pol="x"}) > 2', "no label pol"),
        ("job:baton_requests:rate_5m / job:baton_request:rate_5m", "job:baton_request:rate_5m does not exist"),
    ],
)
def test_the_check_finds_unknown_names(series: Series, text: str, problem: str | None) -> None:
    found = problems(iter([Expression("here", text)]), series)
    assert (found == []) if problem is None else (len(found) == 1 and problem in found[0]), found


def test_the_check_finds_labels_lost_by_aggregation(series: Series) -> None:
    [found] = problems(
        iter([Expression("here", "sum by (pool) (baton_workers)", frozenset({"pool", "state"}))]), series
    )
    assert "shows state" in found


def test_panels_have_names_units_and_explanations() -> None:
    for panel in PANELS:
        assert panel["title"], panel["id"]
        assert panel["description"].endswith("."), panel["title"]
        unit = panel.get("fieldConfig", {}).get("defaults", {}).get("unit") or panel["options"]["yAxis"]["unit"]
        assert unit, panel["title"]
        if "_seconds_bucket" in panel["targets"][0]["expr"]:
            assert unit == "s", panel["title"]
    titles = [panel["title"] for panel in PANELS]
    assert len(set(titles)) == len(titles) > 30


def test_panels_do_not_overlap() -> None:
    ids = [panel["id"] for panel in load_dashboard()["panels"]]
    assert len(set(ids)) == len(ids)
    boxes = [(panel["title"], panel["gridPos"]) for panel in load_dashboard()["panels"]]
    assert all(box["x"] >= 0 and box["x"] + box["w"] <= 24 for _, box in boxes)
    for (one, a), (other, b) in combinations(boxes, 2):
        apart = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        assert apart or a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"], (one, other)


def test_the_data_source_can_be_selected() -> None:
    for panel in PANELS:
        for holder in (panel, *panel["targets"]):
            assert holder["datasource"] == {"type": "prometheus", "uid": "${datasource}"}, panel["title"]


def test_every_cluster_can_be_selected() -> None:
    for expression in dashboard_expressions():
        if not expression.place.startswith("variable"):
            assert expression.text.count("{job=~") == len(re.findall(r"\bbaton_\w+", expression.text)), expression


def test_rules_are_complete() -> None:
    names = [rule.get("alert") or rule["record"] for rule in load_rules()]
    assert len(set(names)) == len(names)
    for rule in load_rules():
        if "record" in rule:
            assert re.fullmatch(r"[a-z_]+:baton_[a-z_]+:[a-z0-9_]+", rule["record"]), rule["record"]
            continue
        assert re.fullmatch(r"Baton[A-Za-z]+", rule["alert"])
        assert rule["labels"]["severity"] in ("warning", "critical"), rule["alert"]
        assert set(rule["annotations"]) == {"summary", "description"}, rule["alert"]
        if "for" in rule:
            assert promql_parser.parse_duration(rule["for"]).total_seconds() > 0


def test_internal_errors_count_as_failures_and_client_errors_do_not() -> None:
    [expression] = [rule["expr"] for rule in load_rules() if rule.get("record", "").startswith("job:baton_requests_f")]
    [pattern] = re.findall(r'outcome=~"([^"]+)"', expression)
    outside = {  # no sequence ends so
        "unsupported_model",
        "model_unavailable",
        "invalid_config",
        "endpoint_full",
        "controller_lost",
        "storage_failed",
        "storage_full",
        "jobs_unavailable",
    }
    for code, cls in error_classes().items():
        if cls.__module__ == "baton.core.errors" and code not in outside:
            assert bool(re.fullmatch(pattern, code)) == (cls.http_status >= 500), code


def test_prometheus_loads_the_rules() -> None:
    config = yaml.safe_load((FOLDER / "prometheus.yaml").read_text(encoding="utf-8"))
    assert [(FOLDER / name).is_file() for name in config["rule_files"]] == [True]
    [job] = config["scrape_configs"]
    [down] = [rule for rule in load_rules() if rule.get("alert") == "BatonDown"]
    assert f'job="{job["job_name"]}"' in down["expr"]


def test_the_documentation_lists_exactly_the_existing_metrics(series: Series) -> None:
    named = set(re.findall(r"\bbaton_[a-z0-9_]+", DOCUMENTATION.read_text(encoding="utf-8")))
    process = {name for name in series.families if name.startswith("baton_router_process_")}
    assert set(series.families) - process <= named
    assert {name for name in named if not name.endswith("_")} <= series.families.keys()
