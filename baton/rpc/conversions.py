"""Conversions between engine objects and wire messages, for requests and tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite, isnan

from baton.core.errors import InvalidRequestError
from baton.core.queue_priority import NO_PRIORITY, QueuePriority
from baton.core.request import FinishReason, Request, SamplingParams, TokenLogprobs, TokenOutput
from baton.core.request_ids import check_id
from baton.core.steps import StepProgress, StepShare
from baton.core.timeline import Event, TransferPart
from baton.rpc.rounds import pack_round
from baton.rpc.wire import worker_pb2

_SCALARS = (
    "max_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "ignore_eos",
    "min_tokens",
    "seed",
    "grammar",
)


def pack_params(params: SamplingParams) -> worker_pb2.SamplingParams:
    return worker_pb2.SamplingParams(
        **{name: getattr(params, name) for name in _SCALARS},
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        logit_bias=dict(params.logit_bias),
        stop_token_ids=params.stop_token_ids,
    )


def unpack_params(message: worker_pb2.SamplingParams) -> SamplingParams:
    """Raises :class:`InvalidRequestError` if a value is out of range."""
    scalars = {name: getattr(message, name) for name in _SCALARS}
    return SamplingParams(
        **scalars,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        logit_bias=tuple(sorted(message.logit_bias.items())),
        stop_token_ids=tuple(message.stop_token_ids),
    )


def pack_sequence(
    request_id: str,
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    output_token_ids: Sequence[int] = (),
    speculation_method: str | None = None,
    queue_priority: QueuePriority = NO_PRIORITY,
    tpot_target_s: float = 0.0,
    now_s: float = 0.0,
    cache_salt: str = "",
    *,
    is_traced: bool = False,
) -> worker_pb2.Sequence:
    """Packs a sequence.

    Args:
        now_s: present time on the clock of the deadline in ``queue_priority``.
    """
    return worker_pb2.Sequence(
        request_id=request_id,
        prompt_token_ids=prompt_token_ids,
        output_token_ids=output_token_ids,
        params=pack_params(params),
        speculation_method=speculation_method or "",
        queue_priority=None if queue_priority == NO_PRIORITY else pack_queue_priority(queue_priority, now_s),
        tpot_target_s=tpot_target_s,
        cache_salt=cache_salt,
        is_traced=is_traced,
    )


def pack_queue_priority(queue_priority: QueuePriority, now_s: float) -> worker_pb2.QueuePriority:
    return worker_pb2.QueuePriority(
        priority=queue_priority.priority,
        due_in_s=queue_priority.deadline_s - now_s,
        patience_s=queue_priority.patience_s,
    )


def unpack_queue_priority(message: worker_pb2.QueuePriority, now_s: float) -> QueuePriority:
    if isnan(message.due_in_s) or isnan(message.patience_s):
        raise InvalidRequestError(
            "A queue_priority must have numbers for due_in_s and patience_s.", param="queue_priority"
        )
    return QueuePriority(message.priority, now_s + message.due_in_s, message.patience_s)


def unpack_sequence(message: worker_pb2.Sequence, eos_token_ids: frozenset[int], arrival_s: float) -> Request:
    """Raises :class:`InvalidRequestError` if the message is not a valid request."""
    check_id(message.request_id, "request_id")
    if not message.prompt_token_ids:
        raise InvalidRequestError("A sequence must have at least one prompt token.", param="prompt")
    tpot_target_s = message.tpot_target_s
    return Request(
        request_id=message.request_id,
        prompt_token_ids=list(message.prompt_token_ids),
        params=unpack_params(message.params),
        eos_token_ids=eos_token_ids,
        output_token_ids=list(message.output_token_ids),
        speculation_method=message.speculation_method or None,
        queue_priority=unpack_queue_priority(message.queue_priority, arrival_s)
        if message.HasField("queue_priority")
        else NO_PRIORITY,
        tpot_target_s=tpot_target_s if isfinite(tpot_target_s) and tpot_target_s > 0 else 0.0,
        cache_salt=message.cache_salt,
        is_traced=message.is_traced,
        arrival_s=arrival_s,
    )


def pack_output(output: TokenOutput) -> worker_pb2.TokenBatch:
    return worker_pb2.TokenBatch(
        token_ids=output.token_ids,
        logprobs=[
            worker_pb2.TokenLogprobs(
                logprob=entry.logprob,
                top=[worker_pb2.Logprob(token_id=token, logprob=value) for token, value in entry.top],
            )
            for entry in output.logprobs or ()
        ],
        finish_reason=str(output.finish_reason or ""),
        num_cached_tokens=output.num_cached_tokens,
        num_drafted=output.num_drafted,
        num_accepted=output.num_accepted,
        drafted_by=output.drafted_by,
        steps=[_pack_step(share) for share in output.steps],
        round=None if output.round is None else pack_round(output.round),
    )


def _pack_step(share: StepShare) -> worker_pb2.EngineStep:
    step, num_computed_tokens = share
    return worker_pb2.EngineStep(
        index=step.index,
        started_s=step.started_s,
        ended_s=step.ended_s,
        busy_s=step.busy_s,
        draft_s=step.draft_s,
        num_steps=step.num_steps,
        num_computed_tokens=num_computed_tokens,
        num_sequences=step.num_sequences,
        num_batch_tokens=step.num_tokens,
        num_prompt_tokens=step.num_prompt_tokens,
    )


def unpack_logprobs(batch: worker_pb2.TokenBatch) -> tuple[TokenLogprobs, ...] | None:
    if not batch.logprobs:
        return None
    return tuple(
        TokenLogprobs(entry.logprob, tuple((top.token_id, top.logprob) for top in entry.top))
        for entry in batch.logprobs
    )


def unpack_finish_reason(batch: worker_pb2.TokenBatch) -> FinishReason | None:
    return FinishReason(batch.finish_reason) if batch.finish_reason else None


def pack_progress(progress: StepProgress, now_s: float) -> worker_pb2.PingReply:
    """The answer to a ping at ``now_s`` of the worker's monotonic clock."""
    return worker_pb2.PingReply(
        monotonic_s=now_s,
        num_steps=progress.num_steps,
        step_age_s=progress.step_age_s,
        expected_step_s=progress.expected_step_s,
    )


def unpack_progress(message: worker_pb2.PingReply) -> StepProgress:
    return StepProgress(message.num_steps, message.step_age_s, message.expected_step_s)


def pack_events(events: Mapping[Event, float]) -> list[worker_pb2.TimedEvent]:
    return [worker_pb2.TimedEvent(name=str(event), at_s=at_s) for event, at_s in events.items()]


def unpack_events(events: Iterable[worker_pb2.TimedEvent]) -> dict[Event, float]:
    return {Event(event.name): event.at_s for event in events}


def pack_parts(parts: Iterable[TransferPart]) -> list[worker_pb2.TransferPart]:
    return [
        worker_pb2.TransferPart(
            num_bytes=part.num_bytes,
            num_parts=part.num_parts,
            started_s=part.started_s,
            sent_s=part.sent_s,
            acknowledged_s=part.acknowledged_s,
        )
        for part in parts
    ]
