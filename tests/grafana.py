"""Reads ``deploy/grafana`` and compares every PromQL expression in it with the series that exist."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import promql_parser as promql
import yaml
from prometheus_client.parser import text_string_to_metric_families

FOLDER = Path(__file__).parents[1] / "deploy" / "grafana"
TARGET_LABELS = frozenset({"job", "instance"})
"""The labels that Prometheus adds to every scraped series."""

_RATES = ("rate", "irate", "increase")
_LABEL_VALUES = re.compile(r"label_values\((.+), *(\w+)\)")
_SHOWN_LABEL = re.compile(r"\{\{ *(?:\$labels\.)?(\w+) *\}\}")
_VARIABLES = {"$__rate_interval": "5m", "$__interval": "1m", "$job": ".*", "$pool": ".*"}


@dataclass
class Series:
    """The series of a page of metrics.

    Attributes:
        labels: name of a sample → label → its values.
        counters: names of samples that only grow.
    """

    labels: dict[str, dict[str, set[str]]] = field(default_factory=dict)
    counters: set[str] = field(default_factory=set)
    families: dict[str, str] = field(default_factory=dict)
    """Name of a family, for counters with ``_total`` → type."""

    @classmethod
    def of_page(cls, text: str) -> Series:
        found = cls(labels={"up": {}})
        for family in text_string_to_metric_families(text):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            found.families[name] = family.type
            for sample in family.samples:
                values = found.labels.setdefault(sample.name, {})
                for label, value in sample.labels.items():
                    values.setdefault(label, set()).add(value)
                if family.type in ("counter", "histogram", "summary"):  # baton's summaries have no quantiles
                    found.counters.add(sample.name)
        return found


@dataclass(frozen=True)
class Expression:
    """A PromQL expression, and the labels in the text beside it."""

    place: str
    text: str
    shown_labels: frozenset[str] = frozenset()

    @property
    def tree(self) -> promql.Expr:
        """The parsed expression. Raises ValueError when it is not PromQL."""
        text = self.text
        for variable, value in _VARIABLES.items():
            text = text.replace(variable, value)
        return promql.parse(text)


def load_dashboard() -> dict[str, Any]:
    return json.loads((FOLDER / "dashboard.json").read_text(encoding="utf-8"))


def load_rules() -> list[dict[str, Any]]:
    """All rules, with the name of their ``group``."""
    groups = yaml.safe_load((FOLDER / "rules.yaml").read_text(encoding="utf-8"))["groups"]
    return [{"group": group["name"], **rule} for group in groups for rule in group["rules"]]


def dashboard_expressions() -> Iterator[Expression]:
    """Yields the expressions of panels, annotations and variables."""
    dashboard = load_dashboard()
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            shown = frozenset(_SHOWN_LABEL.findall(target["legendFormat"]))
            yield Expression(f"panel {panel['title']!r}", target["expr"], shown)
    for annotation in dashboard["annotations"]["list"]:
        shown = frozenset(_SHOWN_LABEL.findall(annotation["titleFormat"]))
        yield Expression(f"annotation {annotation['name']!r}", annotation["expr"], shown)
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            match = _LABEL_VALUES.fullmatch(variable["query"]["query"])
            assert match is not None, variable["query"]
            yield Expression(f"variable {variable['name']!r}", match[1], frozenset({match[2]}))


def rule_expressions() -> Iterator[Expression]:
    for rule in load_rules():
        text = " ".join(rule.get("annotations", {}).values())
        name = rule.get("alert") or rule["record"]
        yield Expression(f"rule {name}", rule["expr"], frozenset(re.findall(r"\$labels\.(\w+)", text)))


def problems(expressions: Iterator[Expression], series: Series) -> list[str]:
    """The unknown names in expressions. Recorded names exist with the labels that their rules keep."""
    recorded = {rule["record"]: rule["expr"] for rule in load_rules() if "record" in rule}
    found = []
    for expression in expressions:
        checker = _Checker(series, recorded)
        left = checker.check(expression.tree)
        missing = expression.shown_labels - left
        found += [f"{expression.place}: {problem}" for problem in checker.problems]
        found += [f"{expression.place}: shows {label}, which its result does not have" for label in sorted(missing)]
    return found


class _Checker:
    def __init__(self, series: Series, recorded: dict[str, str]) -> None:
        self._series = series
        self._recorded = recorded
        self.problems: list[str] = []

    def check(self, node: Any, *, in_rate: bool = False) -> frozenset[str]:
        """Checks a tree; returns the labels of its result."""
        match node:
            case promql.VectorSelector():
                return self._check_selector(node, in_rate=in_rate)
            case promql.MatrixSelector():
                return self._check_selector(node.vector_selector, in_rate=in_rate)
            case promql.Call():
                is_rate = node.func.name in _RATES
                labels = [self.check(argument, in_rate=is_rate) for argument in node.args]
                return frozenset().union(*labels)
            case promql.AggregateExpr():
                inner = self.check(node.expr)
                by = frozenset(node.modifier.labels) if node.modifier else frozenset()
                self.problems += [f"groups by {label}, which {node.expr} does not have" for label in by - inner]
                return by
            case promql.BinaryExpr():
                left, right = self.check(node.lhs), self.check(node.rhs)
                return left | right
            case promql.ParenExpr() | promql.UnaryExpr() | promql.SubqueryExpr():
                return self.check(node.expr)
            case promql.NumberLiteral() | promql.StringLiteral():
                return frozenset()
        raise TypeError(f"{node} is of no kind that this knows")

    def _check_selector(self, node: promql.VectorSelector, *, in_rate: bool) -> frozenset[str]:
        name = node.name or ""
        if name in self._recorded:
            return _Checker(self._series, self._recorded).check(promql.parse(self._recorded[name]))
        if name not in self._series.labels:
            self.problems.append(f"{name} does not exist")
            return TARGET_LABELS
        if in_rate and name not in self._series.counters:
            self.problems.append(f"{name} is no counter, so it has no rate")
        known = self._series.labels[name]
        for matcher in node.matchers.matchers:
            if matcher.name in TARGET_LABELS:
                continue
            values = known.get(matcher.name)
            if values is None:
                self.problems.append(f"{name} has no label {matcher.name}")
            elif not all(any(re.fullmatch(part, value) for value in values) for part in _alternatives(matcher)):
                self.problems.append(f"{name} has no {matcher.name} like {matcher.value}, only {sorted(values)}")
        return frozenset(known) | TARGET_LABELS


def _alternatives(matcher: promql.Matcher) -> list[str]:
    """The patterns that must each match some value."""
    if matcher.op in (promql.MatchOp.Equal, promql.MatchOp.NotEqual):
        return [re.escape(matcher.value)]
    return [matcher.value] if "(" in matcher.value else matcher.value.split("|")
