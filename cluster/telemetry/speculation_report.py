"""How a decode worker speculates, and what would be better: for ``baton status`` and ``baton advise``. JSON-ready."""

from __future__ import annotations

from typing import Any

from baton.core.draft_payoff import (
    LARGEST_DRAFT_SHARE,
    MAX_LENGTH,
    Acceptance,
    advise_length,
    payoff_curve,
)
from baton.core.roles import DRAFT_METHODS
from baton.core.speculation_rates import size_class
from baton.rpc.wire import worker_pb2
from cluster.telemetry.draft_curves import formula_errors, measured_acceptance, measured_figures
from cluster.telemetry.draft_metrics import OTHER_METHOD, SHADOW, batch_label, method_label, mode_of

_ENOUGH_DRAFTS = 50
"""Drafts before there is advice: the error of an acceptance of one half is 7 % then."""


def speculation_report(stats: worker_pb2.WorkerStats) -> dict[str, Any] | None:
    """The worker's figures by method; ``None`` for a worker that does not speculate."""
    if not stats.HasField("speculation"):
        return None
    state = stats.speculation
    return {
        "method": state.default_method,
        "draft_share": round(state.draft_share, 4) or None,
        "tokens_per_sequence": round(state.tokens_per_sequence, 3),
        "methods": [_figures(entry, stats.num_running) for entry in _chosen_methods(stats)],
    }


def speculation_advice(worker_id: str, stats: worker_pb2.WorkerStats) -> list[dict[str, Any]]:
    """For each method that drafted on the worker: its figures, the curves over the length, the best one, and advice."""
    if not stats.HasField("speculation"):
        return []
    found = []
    for entry in _chosen_methods(stats):
        advice = {
            "worker": worker_id,
            **_figures(entry, stats.num_running),
            **measured_figures(entry),
            "tokens_per_sequence": round(stats.speculation.tokens_per_sequence, 3),
            "num_without_draft": stats.speculation.num_without_draft,
        }
        found.append({**advice, **_advice(advice, entry, stats.speculation.draft_share)})
    return found


def _chosen_methods(stats: worker_pb2.WorkerStats) -> list[worker_pb2.MethodStats]:
    """Those that can be chosen: what grammars force is no choice."""
    return [entry for entry in stats.methods if method_label(entry.method) != OTHER_METHOD]


def _figures(entry: worker_pb2.MethodStats, num_running: int) -> dict[str, Any]:
    """A method's acceptance, its cost at the current size of the batch, and the length of its drafts."""
    costs = {batch_label(cost.size_class): cost.drafting + cost.verifying for cost in entry.costs}
    cost = _cost_at(entry, size_class(max(1, num_running)))
    return {
        "method": method_label(entry.method),
        "mode": mode_of(entry),
        "num_drafts": entry.num_drafts,
        "acceptance": [round(chance, 4) for chance in entry.recent_acceptance],
        "alpha": _alpha(entry),
        "cost": None if cost is None else round(cost.drafting + cost.verifying, 4),
        "batch": None if cost is None else batch_label(cost.size_class),
        "costs": {batch: round(value, 4) for batch, value in costs.items()},
        "length": round(entry.recent_length, 2),
    }


def _cost_at(entry: worker_pb2.MethodStats, size: int) -> worker_pb2.DraftCost | None:
    """The cost at the measured size of batches that is nearest."""
    return min(entry.costs, key=lambda cost: abs(int(cost.size_class) - size), default=None)


def _alpha(entry: worker_pb2.MethodStats) -> float | None:
    """One acceptance for all positions: the recent ones, weighted by how often each position was reached."""
    pairs = list(zip(entry.recent_acceptance, entry.reached, strict=False))
    weight = sum(reached for _, reached in pairs)
    return round(sum(chance * reached for chance, reached in pairs) / weight, 4) if weight else None


def _advice(figures: dict[str, Any], entry: worker_pb2.MethodStats, draft_share: float) -> dict[str, Any]:
    alpha, cost = figures["alpha"], figures["cost"]
    warnings = []
    if figures["method"] in DRAFT_METHODS and draft_share > LARGEST_DRAFT_SHARE:
        warnings.append(
            f"The draft has {draft_share:.0%} of the model's parameters, more than a tenth: its passes cost too much. "
            "Use a smaller one (speculation.draft), or an EAGLE head."
        )
    if alpha is None or cost is None or figures["num_drafts"] < _ENOUGH_DRAFTS:
        text = f"Drafts so far: {figures['num_drafts']}; there is advice from {_ENOUGH_DRAFTS} on."
        return {
            "best_by_formula": None,
            "best_measured": None,
            "curves": None,
            "formula_errors": [],
            "advice": text,
            "warnings": warnings,
        }
    curve = payoff_curve(Acceptance((alpha,)), cost)
    measured = payoff_curve(measured_acceptance(entry), cost)
    if not measured.peak:
        instead = "speculation.shadow" if figures["mode"] == SHADOW else "speculation.method"
        warnings.append(
            f"{figures['method']} does not pay off with up to {MAX_LENGTH} tokens at this batch: the first token is "
            f"accepted in {figures['acceptance'][0]:.0%} and costs {cost:.0%} of a step. Choose another method "
            f"({instead})."
        )
    return {
        "best_by_formula": curve.peak,
        "best_measured": measured.peak,
        "speedup_by_formula": round(curve.peak_speedup, 3),
        "speedup_measured": round(measured.peak_speedup, 3),
        "curves": {"by_formula": curve.to_dict(), "measured": measured.to_dict()},
        "formula_errors": formula_errors(curve, measured, entry),
        "advice": advise_length(alpha, curve).text,
        "warnings": warnings,
    }
