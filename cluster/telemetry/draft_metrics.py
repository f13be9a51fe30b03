"""Prometheus series of speculation on decode workers. Label values come from short lists, whatever workers report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from baton.core.roles import SpeculationMethod
from baton.core.workloads import Workload
from baton.rpc.wire import worker_pb2

OTHER_METHOD = "other"
OTHER_WORKLOAD = "other"
USED, SHADOW = "used", "shadow"
_METHODS = frozenset(get_args(SpeculationMethod))
_LONG_LENGTHS = ((9, 16), (17, 32), (33, 64))
_LARGEST_SIZE_CLASS = 11
_TEMPERATURES = ("0-0.25", "0.25-0.75", "0.75-1.25", "1.25-1.75", "1.75+")
_WORKLOADS = frozenset(Workload)

Labels = tuple[str, ...]
Workers = Mapping[tuple[str, str], worker_pb2.WorkerStats]
ValuesOf = Callable[[worker_pb2.MethodStats], list[tuple[Labels, float]]]


def length_label(tokens: int) -> str:
    """The label of a draft's length or of a position in it: each number up to 8, then ranges."""
    if tokens <= 8:
        return str(tokens)
    return next((f"{low}-{high}" for low, high in _LONG_LENGTHS if tokens <= high), "65+")


def batch_label(size_class: int) -> str:
    """The label of a :func:`baton.core.speculation_rates.size_class`: ``1``, ``2-3``, ``4-7`` …"""
    if size_class >= _LARGEST_SIZE_CLASS:
        return f"{1 << (_LARGEST_SIZE_CLASS - 1)}+"
    low, high = 1 << max(0, size_class - 1), (1 << max(1, size_class)) - 1
    return str(low) if low == high else f"{low}-{high}"


def kind_labels(kind: worker_pb2.DraftKind) -> Labels:
    """The range of temperatures, and the workload or ``other``."""
    temperature = _TEMPERATURES[min(kind.temperature_class, len(_TEMPERATURES) - 1)]
    return temperature, kind.workload if kind.workload in _WORKLOADS else OTHER_WORKLOAD


def method_label(method: str) -> str:
    """The method's name, or ``other``, to bound the number of series."""
    return method if method in _METHODS else OTHER_METHOD


def mode_of(entry: worker_pb2.MethodStats) -> str:
    """``shadow`` for drafts that were only compared with the model's tokens."""
    return SHADOW if entry.is_shadow else USED


def draft_families(workers: Workers) -> Iterator[Metric]:
    """The series of all workers that answered."""
    for name, text, value in (
        ("baton_worker_drafts", "Drafts with a known outcome, by method.", "num_drafts"),
        ("baton_worker_drafted_tokens", "Tokens in these drafts, by method.", "num_drafted_tokens"),
        ("baton_worker_accepted_tokens", "Draft tokens that the model accepted, by method.", "num_accepted_tokens"),
    ):
        yield _counter(name, text, (), workers, _total(value))
    for name, text, value in (
        (
            "baton_worker_draft_positions_reached",
            "Draft tokens that were judged after all before them had been accepted, by position in the draft.",
            "reached",
        ),
        (
            "baton_worker_draft_positions_accepted",
            "Draft tokens that were accepted with all before them, by position in the draft.",
            "accepted",
        ),
    ):
        yield _counter(name, text, ("position",), workers, _by_position(value))
    for name, text, value in (
        (
            "baton_worker_draft_kinds_reached",
            "Draft tokens that were judged after all before them had been accepted, by temperature and workload.",
            "reached",
        ),
        (
            "baton_worker_draft_kinds_accepted",
            "Draft tokens that were accepted with all before them, by temperature and workload.",
            "accepted",
        ),
    ):
        yield _counter(name, text, ("temperature", "workload"), workers, _by_kind(value))
    yield _choices(workers)
    yield from _gauges(workers)


def _total(field: str) -> ValuesOf:
    return lambda entry: [((), float(getattr(entry, field)))]


def _by_position(field: str) -> ValuesOf:
    return lambda entry: _by_length(getattr(entry, field))


def _by_kind(field: str) -> ValuesOf:
    return lambda entry: [(kind_labels(kind), float(getattr(kind, field))) for kind in entry.kinds]


def _counter(name: str, text: str, labels: Labels, workers: Workers, values_of: ValuesOf) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=["pool", "worker", "method", "mode", *labels])
    for worker, stats in workers.items():
        sums: dict[Labels, float] = {}
        for entry in stats.methods:
            for further, value in values_of(entry):
                key = (method_label(entry.method), mode_of(entry), *further)
                sums[key] = sums.get(key, 0.0) + value
        for key, value in sums.items():
            family.add_metric([*worker, *key], value)
    return family


def _by_length(counts: Sequence[int]) -> list[tuple[Labels, float]]:
    return [((length_label(position),), count) for position, count in enumerate(counts, start=1)]


def _choices(workers: Workers) -> CounterMetricFamily:
    family = CounterMetricFamily(
        "baton_worker_draft_choices",
        "Choices of the method auto for a sequence of a step, by method and tokens drafted; none: no draft.",
        labels=["pool", "worker", "method", "tokens"],
    )
    for worker, stats in workers.items():
        if not stats.HasField("speculation"):
            continue
        family.add_metric([*worker, "none", "0"], stats.speculation.num_without_draft)
        sums: dict[Labels, float] = {}
        for entry in stats.methods:
            for (tokens,), count in _by_length(entry.chosen_lengths):
                key = (method_label(entry.method), tokens)
                sums[key] = sums.get(key, 0.0) + count
        for labels, count in sums.items():
            family.add_metric([*worker, *labels], count)
    return family


def _gauges(workers: Workers) -> Iterator[Metric]:
    tokens = GaugeMetricFamily(
        "baton_worker_draft_tokens_per_sequence",
        "Tokens that the method auto drafts per sequence and step, in recent steps.",
        labels=["pool", "worker"],
    )
    size = GaugeMetricFamily(
        "baton_worker_draft_size_ratio",
        "Parameters of the draft relative to those of the model; 0 without a draft.",
        labels=["pool", "worker"],
    )
    cost = GaugeMetricFamily(
        "baton_worker_draft_cost_ratio",
        "Cost of a draft token for each sequence of a batch, relative to a step without drafts.",
        labels=["pool", "worker", "method", "mode", "batch", "part"],
    )
    for worker, stats in workers.items():
        if not stats.HasField("speculation"):
            continue
        tokens.add_metric(worker, stats.speculation.tokens_per_sequence)
        size.add_metric(worker, stats.speculation.draft_share)
        costs: dict[Labels, float] = {}
        for entry in stats.methods:
            for each in entry.costs:
                for part, value in (("drafting", each.drafting), ("verifying", each.verifying)):
                    key = (method_label(entry.method), mode_of(entry), batch_label(each.size_class), part)
                    costs[key] = max(costs.get(key, 0.0), value)
        for labels, value in costs.items():
            cost.add_metric([*worker, *labels], value)
    yield from (tokens, size, cost)
