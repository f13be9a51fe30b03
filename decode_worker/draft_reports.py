"""A decode worker's figures of its drafts as wire messages."""

from __future__ import annotations

from baton.rpc.wire import worker_pb2
from decode_worker.speculation.controller import SpeculationController
from decode_worker.speculation.draft_figures import DraftFigures


def fill_speculation(stats: worker_pb2.WorkerStats, controller: SpeculationController, draft_share: float) -> None:
    """Adds how the worker speculates. May run beside the engine's thread: figures can be a step apart.

    Args:
        draft_share: the draft's size relative to the model's; 0 if there is no draft, or it is unknown.
    """
    figures = controller.figures
    stats.num_draft_failures = controller.num_failures
    stats.speculation.CopyFrom(
        worker_pb2.SpeculationState(
            default_method=controller.default,
            draft_share=draft_share,
            num_without_draft=figures.num_without_draft,
            tokens_per_sequence=figures.recent_choice.value,
        )
    )
    for method, own in list(figures.by_method.items()):
        stats.methods.append(_packed(method, own))
    if (shadow := controller.shadow) is not None:
        stats.methods.append(_packed(shadow.method, shadow.figures, is_shadow=True))


def _packed(method: str, figures: DraftFigures, *, is_shadow: bool = False) -> worker_pb2.MethodStats:
    message = worker_pb2.MethodStats(
        method=method,
        num_drafts=figures.num_drafts,
        num_drafted_tokens=figures.num_drafted,
        num_accepted_tokens=figures.num_accepted,
        reached=figures.reached,
        accepted=figures.accepted,
        recent_acceptance=[mean.value for mean in list(figures.recent_acceptance)],
        chosen_lengths=figures.chosen,
        recent_length=figures.recent_length.value,
        is_shadow=is_shadow,
    )
    for size, sums in list(figures.costs.items()):
        if sums.tokens:
            drafting, verifying = sums.per_token()
            message.costs.add(size_class=size, drafting=drafting, verifying=verifying)
    for (temperature, workload), counts in list(figures.kinds.items()):
        message.kinds.add(
            temperature_class=temperature,
            workload=workload,
            num_drafts=counts.num_drafts,
            reached=counts.num_reached,
            accepted=counts.num_accepted,
        )
    return message
