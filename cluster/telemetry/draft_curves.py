"""The measured curve of a method's drafts beside that of the formula, and where the formula is wrong. JSON-ready."""

from __future__ import annotations

from typing import Any

from baton.core.draft_payoff import Acceptance, PayoffCurve, payoff_curve
from baton.rpc.wire import worker_pb2
from cluster.telemetry.draft_metrics import batch_label, kind_labels

_ENOUGH_JUDGED = 50
"""Judged tokens that make the acceptance of a position: of one half, the error is 7 % then."""
_CLEAR_GAP = 0.05
"""Difference of two speed-ups that is worth a sentence, relative to the measured one."""


def measured_figures(entry: worker_pb2.MethodStats) -> dict[str, Any]:
    """Judged tokens by position, acceptance by kind of request, costs by batch, and the lengths that ``auto`` chose."""
    return {
        "judged": list(entry.reached),
        "kinds": [_kind(kind) for kind in sorted(entry.kinds, key=kind_labels)],
        "batches": [
            {
                "batch": batch_label(cost.size_class),
                "drafting": round(cost.drafting, 4),
                "verifying": round(cost.verifying, 4),
                "cost": round(cost.drafting + cost.verifying, 4),
            }
            for cost in sorted(entry.costs, key=lambda cost: cost.size_class)
        ],
        "chosen": list(entry.chosen_lengths),
    }


def measured_acceptance(entry: worker_pb2.MethodStats) -> Acceptance:
    """Acceptance by position; of the first one, and of later ones that enough drafts have reached.

    Raises:
        ValueError: no draft was judged.
    """
    pairs = list(zip(entry.recent_acceptance, entry.reached, strict=False))
    enough = [chance for chance, reached in pairs[1:] if reached >= _ENOUGH_JUDGED]
    return Acceptance((*entry.recent_acceptance[:1], *enough))


def formula_errors(by_formula: PayoffCurve, measured: PayoffCurve, entry: worker_pb2.MethodStats) -> list[str]:
    """Where one α for all positions, and a c without verification, lead to another result; as sentences."""
    alpha, chances = by_formula.acceptance.by_position[0], measured.acceptance.by_position
    texts = []
    gaps = [one / other - 1.0 for one, other in zip(by_formula.speedups, measured.speedups, strict=True)]
    length = max(range(len(gaps)), key=lambda index: abs(gaps[index]))
    if len(chances) > 1 and abs(gaps[length]) >= _CLEAR_GAP:
        goes = "falls" if chances[-1] < chances[0] else "rises"
        texts.append(
            f"Acceptance {goes} with depth: {chances[0]:.2f} at position 1, {chances[-1]:.2f} at position "
            f"{len(chances)}. The formula takes {alpha:.2f} everywhere, and gets {by_formula.speedups[length]:.2f} "
            f"instead of {measured.speedups[length]:.2f} for k = {length + 1}."
        )
    if (loss := max((_verification_loss(measured.acceptance, cost) for cost in entry.costs), default=None)) is not None:
        gap, text = loss
        texts += [text] if gap >= _CLEAR_GAP else []
    return texts


def _verification_loss(acceptance: Acceptance, cost: worker_pb2.DraftCost) -> tuple[float, str]:
    """What the verification takes from the best speed-up in batches of a size: as a share, and as sentences."""
    whole = cost.drafting + cost.verifying
    free, real = (payoff_curve(acceptance, each).peak_speedup for each in (cost.drafting, whole))
    text = (
        f"Verification is not free: in batches of {batch_label(cost.size_class)} it is "
        f"{cost.verifying / whole if whole else 0.0:.0%} of c = {whole:.3f}. If it were, the best speed-up would be "
        f"{free:.2f} instead of {real:.2f}."
    )
    return free / real - 1.0, text


def _kind(kind: worker_pb2.DraftKind) -> dict[str, Any]:
    temperature, workload = kind_labels(kind)
    alpha = round(kind.accepted / kind.reached, 4) if kind.reached else None
    return {"temperature": temperature, "workload": workload, "num_drafts": kind.num_drafts, "alpha": alpha}
