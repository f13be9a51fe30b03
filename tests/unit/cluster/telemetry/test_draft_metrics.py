"""Series of speculation: by position, batch and mode, with labels from short lists."""

from __future__ import annotations

from prometheus_client.core import CollectorRegistry

from baton.rpc.wire import worker_pb2
from cluster.telemetry.cluster_metrics import ClusterCollector, ClusterFigures
from cluster.telemetry.draft_metrics import batch_label, length_label

LABELS = {"pool": "decode", "worker": "d"}


def registry_of(*methods: worker_pb2.MethodStats) -> CollectorRegistry:
    state = worker_pb2.SpeculationState(
        default_method="auto", draft_share=0.07, num_without_draft=5, tokens_per_sequence=1.5
    )
    collector = ClusterCollector()
    collector.figures = ClusterFigures(
        {
            ("decode", "d"): worker_pb2.WorkerStats(methods=methods, speculation=state),
            ("prefill", "p"): worker_pb2.WorkerStats(),
        }
    )
    registry = CollectorRegistry()
    registry.register(collector)
    return registry


def test_acceptance_has_a_series_for_each_position_and_mode():
    used = worker_pb2.MethodStats(method="ngram", reached=[9, 4], accepted=[6, 1])
    shadow = worker_pb2.MethodStats(method="ngram", reached=[3], accepted=[2], is_shadow=True)
    registry = registry_of(used, shadow)
    for mode, position, reached, accepted in (("used", "1", 9, 6), ("used", "2", 4, 1), ("shadow", "1", 3, 2)):
        labels = {**LABELS, "method": "ngram", "mode": mode, "position": position}
        assert registry.get_sample_value("baton_worker_draft_positions_reached_total", labels) == reached
        assert registry.get_sample_value("baton_worker_draft_positions_accepted_total", labels) == accepted


def test_the_choices_of_auto_include_those_against_drafts():
    registry = registry_of(worker_pb2.MethodStats(method="suffix", chosen_lengths=[0, 4, *[0] * 18, 2]))
    name = "baton_worker_draft_choices_total"
    assert registry.get_sample_value(name, {**LABELS, "method": "none", "tokens": "0"}) == 5
    assert registry.get_sample_value(name, {**LABELS, "method": "suffix", "tokens": "2"}) == 4
    assert registry.get_sample_value(name, {**LABELS, "method": "suffix", "tokens": "17-32"}) == 2
    assert registry.get_sample_value("baton_worker_draft_tokens_per_sequence", LABELS) == 1.5


def test_costs_have_a_series_for_each_size_of_batch():
    costs = [
        worker_pb2.DraftCost(size_class=1, drafting=0.1, verifying=0.05),
        worker_pb2.DraftCost(size_class=4, drafting=0.3),
    ]
    registry = registry_of(worker_pb2.MethodStats(method="eagle3", costs=costs))
    labels = {**LABELS, "method": "eagle3", "mode": "used"}
    name = "baton_worker_draft_cost_ratio"
    assert registry.get_sample_value(name, {**labels, "batch": "1", "part": "drafting"}) == 0.1
    assert registry.get_sample_value(name, {**labels, "batch": "1", "part": "verifying"}) == 0.05
    assert registry.get_sample_value(name, {**labels, "batch": "8-15", "part": "drafting"}) == 0.3
    assert registry.get_sample_value("baton_worker_draft_size_ratio", LABELS) == 0.07


def test_acceptance_has_a_series_for_each_temperature_and_workload():
    kinds = [
        worker_pb2.DraftKind(temperature_class=0, workload="grammar", reached=9, accepted=6),
        worker_pb2.DraftKind(temperature_class=4, workload="long_prompt", reached=4, accepted=1),
    ]
    registry = registry_of(worker_pb2.MethodStats(method="eagle3", kinds=kinds))
    for temperature, workload, reached, accepted in (("0-0.25", "grammar", 9, 6), ("1.75+", "long_prompt", 4, 1)):
        labels = {**LABELS, "method": "eagle3", "mode": "used", "temperature": temperature, "workload": workload}
        assert registry.get_sample_value("baton_worker_draft_kinds_reached_total", labels) == reached
        assert registry.get_sample_value("baton_worker_draft_kinds_accepted_total", labels) == accepted


def test_labels_come_from_short_lists():
    assert {length_label(tokens) for tokens in range(1000)} == {*map(str, range(9)), "9-16", "17-32", "33-64", "65+"}
    assert [batch_label(size) for size in (0, 1, 2, 3, 7)] == ["1", "1", "2-3", "4-7", "64-127"]
    assert len({batch_label(size) for size in range(60)}) == 11
    kinds = [worker_pb2.DraftKind(temperature_class=n, workload=f"made-up-{n}", reached=1) for n in range(500)]
    methods = [worker_pb2.MethodStats(method=f"made-up-{n}", reached=[1] * 500, kinds=kinds) for n in range(20)]
    series = [sample for family in registry_of(*methods).collect() for sample in family.samples]
    assert {sample.labels["method"] for sample in series if "method" in sample.labels} == {"other", "none"}
    assert len(series) < 120
