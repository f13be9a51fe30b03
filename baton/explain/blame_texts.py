"""Explains slow stages in plain words, with hints on what to change. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from baton.core.step_log import StepRow
from baton.core.timeline import AwaitedRoom, Event, FailedAttempt, Timeline
from baton.explain.critical_path import Stage

_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Reason:
    """The explanation of a slow stage.

    Attributes:
        clause: what happened, as a clause that follows a colon.
        hint: what to change.
    """

    clause: str
    hint: str


def reason_for(stage: Stage, timeline: Timeline, failures: Sequence[FailedAttempt] = ()) -> Reason:
    """The likely reason in the timeline why a stage took long.

    Args:
        failures: attempts that failed in the blamed interval.
    """
    if failures and stage in _AFTER_FAILURES:
        return _AFTER_FAILURES[stage](timeline, failures)
    special = _SPECIAL.get(stage)
    if special is not None:
        return special(timeline)
    clause, hint = _PLAIN[stage]
    return Reason(
        clause.format(
            prefill=_computing_worker(timeline),
            decode=_worker(timeline, "decode_worker", "the decode worker"),
            prompt=timeline.attributes.get("prompt_tokens", "its"),
        ),
        hint.format(pool=_computing_pool(timeline)),
    )


_ROUTER_BUSY = (
    "The router's process is short of CPU time: one event loop serves all requests. Send fewer "
    "requests at once, or keep its "
    "cores free (engine.threads, other programs)."
)
_WORKER_BUSY = (
    "Check the network, and whether a worker's process is short of CPU time; on one machine, workers and router share "
    "the cores (engine.threads)."
)

_SHORT_STEP = (
    "A step of so few tokens takes as long as the device reads the weights: use a smaller or quantized model, or a "
    "faster device. If other steps of the same size were quick, the machine was short of CPU time."
)
_FEW_TOKENS = 32
"""A step of at most so many tokens is not shorter with fewer."""
_MANY_CHUNKS = 4
_SMALL_CHUNK = 256
"""A prompt computed in at least that many steps, of fewer tokens each, pays the fixed cost of a step too often."""

_PLAIN: dict[Stage, tuple[str, str]] = {
    Stage.ACCEPT: ("the request waited until the HTTP server began to work on it", _ROUTER_BUSY),
    Stage.PARSE: (
        "its body was read and parsed",
        "Check how the client sends it: a slow upload or a very large body counts here.",
    ),
    Stage.TOKENIZE: (
        "its prompt of {prompt} tokens was checked and tokenized",
        "Send token ids instead of text, or a shorter prompt; if prompts are short, the router is short of CPU time.",
    ),
    Stage.ADMIT: (
        "it waited until the router accepted it; further choices of a prompt (n) wait for the first "
        "token of the first one",
        "Request fewer choices, or send them as separate requests. With one choice: " + _ROUTER_BUSY,
    ),
    Stage.ROUTE: (
        "no worker was available",
        "See `baton status` for the reason, and use `baton scale` to run several workers per pool.",
    ),
    Stage.TO_PREFILL: ("it was on its way to {prefill}", _WORKER_BUSY),
    Stage.PREFILL_QUEUE: (
        "it waited in the queue of {prefill}, behind other prompts",
        "Add {pool} workers (`baton scale {pool}=N`), or raise {pool}.chunk_tokens or max_num_seqs if its steps "
        "are not full.",
    ),
    Stage.PREFILL_WAIT: (
        "between the chunks of its prompt, {prefill} was busy with other prompts",
        "Add {pool} workers (`baton scale {pool}=N`), or raise {pool}.chunk_tokens, so that prompts need fewer chunks.",
    ),
    Stage.FIRST_TOKEN_DELIVERY: ("the first token was on its way from {prefill} to the router", _WORKER_BUSY),
    Stage.FIRST_TOKEN_SEND: ("the router turned the first token into text and sent it", _ROUTER_BUSY),
    Stage.TO_DECODE: ("it was on its way to {decode}", _WORKER_BUSY),
    Stage.DECODE_QUEUE: (
        "it waited in the queue of {decode}",
        "Add decode workers (`baton scale decode=N`), or raise their capacity (decode.max_num_seqs, decode.kv_blocks).",
    ),
    Stage.DECODE: (
        "{decode} generated tokens",
        "Smaller batches (decode.max_num_seqs) or more decode workers make steps shorter; see also speculation.",
    ),
    Stage.DECODE_WAIT: (
        "{decode} was busy with other work between its steps",
        "Add decode workers (`baton scale decode=N`).",
    ),
    Stage.TOKEN_DELIVERY: ("its token was on its way from {decode} to the router", _WORKER_BUSY),
    Stage.DETOKENIZE: ("the last tokens were turned into text", _ROUTER_BUSY),
    Stage.OTHER_SEQUENCES: (
        "other sequences of the same request were still running",
        "Send them as separate requests if they should not wait for each other.",
    ),
    Stage.SEND: (
        "the answer was handed to the connection",
        "Check whether the client reads slowly. Otherwise: " + _ROUTER_BUSY,
    ),
}


_QUEUED: dict[AwaitedRoom, Reason] = {
    AwaitedRoom.PREFILL: Reason(
        "until fewer prompts were ahead of its first token, which would have missed its TTFT target",
        "Add prefill workers (`baton scale prefill=N`), or use an SLO class with a wider TTFT target.",
    ),
    AwaitedRoom.DECODE: Reason(
        "until decode workers had fewer sequences, since its TPOT or theirs would have missed the target",
        "Add decode workers (`baton scale decode=N`), or use an SLO class with a wider TPOT target.",
    ),
    AwaitedRoom.SEAT: Reason(
        "until a decode worker had a free place in its batch, and enough free KV blocks",
        "Raise decode.max_num_seqs if `baton status` shows as many running sequences, or the KV cache "
        "(decode.kv_blocks or decode.kv_memory_gib); or add decode workers (`baton scale decode=N`).",
    ),
    AwaitedRoom.TURN: Reason(
        "behind requests that came before it or are more urgent",
        "Add workers (`baton plan` says to which pool), or use an SLO class of a higher priority.",
    ),
    AwaitedRoom.GATHERING: Reason(
        "for other prompts, to be computed in one step with them",
        "Lower admission.gather_ms or admission.gather_share, if the first token matters more than the throughput; "
        "with admission.gather_for: latency, prompts wait only where that helps those that come.",
    ),
}


def _admission_queue(timeline: Timeline) -> Reason:
    awaited = AwaitedRoom(str(timeline.attributes.get("admission_waited_for", AwaitedRoom.TURN)))
    reason = _QUEUED[awaited]
    return Reason(f"it waited in the router's queue {reason.clause}, or it was refused", reason.hint)


def _prefill(timeline: Timeline) -> Reason:
    rows = list(timeline.prefill_steps)
    own, num_steps = sum(row.num_computed for row in rows), len(timeline.prefill_steps)
    cached = timeline.attributes.get("cached_tokens", 0)
    pool = _computing_pool(timeline)
    clause = f"{_computing_worker(timeline)} computed its prompt"
    if rows:
        clause += f", {own:.0f} tokens in {_count(num_steps, 'step')}"
        clause += f" ({cached} more were cached)" if cached else ""
        others = sum(row.num_prompt_tokens for row in rows if row.num_steps == 1) - own
        if others > own:
            clause += f", together with {others:.0f} tokens of other prompts"
            return Reason(
                clause,
                f"Add {pool} workers (`baton scale {pool}=N`), or lower {pool}.max_num_seqs, so that prompts share "
                "their steps with fewer others.",
            )
        if num_steps >= _MANY_CHUNKS and own < _SMALL_CHUNK * num_steps:
            return Reason(f"{clause}, a chunk of about {own / num_steps:.0f} in each", _larger_chunks(rows, pool))
        if own <= _FEW_TOKENS and num_steps == 1:
            return Reason(clause, _SHORT_STEP)
    return Reason(
        clause,
        "Use a shorter prompt, a prefix that other prompts share (the prefix cache keeps it), or a faster device for "
        f"the {pool} pool.",
    )


def _larger_chunks(rows: Sequence[StepRow], pool: str) -> str:
    """How a prompt gets larger chunks: beside sequences that decode, their TPOT target limits it as well."""
    hint = f"Raise {pool}.chunk_tokens: each step has a fixed cost, so fewer and larger chunks take less time."
    if any(row.num_batch_tokens > row.num_prompt_tokens for row in rows if row.num_steps == 1):
        hint += (
            " If it is large already, the chunks were small to keep the TPOT target of sequences that decoded in the "
            "same steps: widen this target, or use routing.local_prefill: never."
        )
    return hint


def _kv_wait(timeline: Timeline) -> Reason:
    events = timeline.events
    reserved_s, started_s = events.get(Event.TRANSFER_RESERVED), events.get(Event.TRANSFER_STARTED)
    committed_s = events.get(Event.KV_COMMITTED)
    worker = _worker(timeline, "decode_worker", "the decode worker")
    if None not in (reserved_s, started_s, committed_s) and (
        float(reserved_s or 0) - float(started_s or 0) > float(committed_s or 0) - float(reserved_s or 0)
    ):
        return Reason(
            f"{worker} reserved KV blocks late: it computed a step, or had none free",
            "If `baton status` shows that its KV cache is full, enlarge it (decode.kv_blocks or kv_memory_gib), or add "
            "decode workers (`baton scale decode=N`). Otherwise its steps are long, as with prompts that it computes "
            "itself (routing.local_prefill).",
        )
    clause = f"{worker} waited for its KV"
    num_bytes = sum(part.num_bytes for part in timeline.parts)
    if num_bytes:
        first_s = min(part.started_s for part in timeline.parts)
        last_s = max(part.acknowledged_s or part.sent_s for part in timeline.parts)
        clause += f", {num_bytes / _MIB:.1f} MiB"
        if last_s > first_s:
            clause += f" at {num_bytes / _MIB / (last_s - first_s):.0f} MiB/s during the transfer"
    return Reason(
        clause,
        "Use a faster network between the pools, a higher kv_transfer.max_bytes_per_second if one is set, smaller "
        "prefill.chunk_tokens so that more KV is sent while prefill still runs, or a shorter prompt.",
    )


def _recompute(timeline: Timeline) -> Reason:
    return Reason(
        f"{_computed_again(timeline)}, because it had been preempted: the KV cache was full",
        "Enlarge the KV cache (decode.kv_blocks or kv_memory_gib), add decode workers (`baton scale decode=N`), or "
        "run fewer sequences at once (decode.max_num_seqs).",
    )


def _recompute_after(timeline: Timeline, failures: Sequence[FailedAttempt]) -> Reason:
    return Reason(
        f"{_computed_again(timeline)}, because {_failed(failures)}",
        "See `baton status` and the workers' logs for the failure.",
    )


def _computed_again(timeline: Timeline) -> str:
    count = sum(row.num_computed for row in timeline.decode_steps if row.recomputes)
    return f"{_worker(timeline, 'decode_worker', 'the decode worker')} computed {count:.0f} of its tokens again"


def _retry(timeline: Timeline, failures: Sequence[FailedAttempt] = ()) -> Reason:
    what = _failed(failures or timeline.failed_attempts)
    return Reason(f"{what}, and another worker took over", "See `baton status` and the workers' logs for the failure.")


def _route_after(timeline: Timeline, failures: Sequence[FailedAttempt]) -> Reason:
    if failures[-1].resumed_s is None:
        end = "waited for a worker, but none took over"
    else:
        end = f"waited for a worker until {_worker(timeline, 'decode_worker', 'the decode worker')} took over"
    return Reason(
        f"{_failed(failures)}, and it {end}",
        "Run several workers per pool (`baton scale`), so that another one takes over at once. See the workers' logs "
        "for the failure.",
    )


def _failed(failures: Sequence[FailedAttempt]) -> str:
    return f"{_count(len(failures), 'attempt')} failed ({', '.join(attempt.error for attempt in failures)})"


_SPECIAL: dict[Stage, Callable[[Timeline], Reason]] = {
    Stage.ADMISSION_QUEUE: _admission_queue,
    Stage.PREFILL: _prefill,
    Stage.KV_WAIT: _kv_wait,
    Stage.RECOMPUTE: _recompute,
    Stage.RETRY: _retry,
}

_AFTER_FAILURES: dict[Stage, Callable[[Timeline, Sequence[FailedAttempt]], Reason]] = {
    Stage.ROUTE: _route_after,
    Stage.RECOMPUTE: _recompute_after,
    Stage.RETRY: _retry,
}


def slow_step_reason(timeline: Timeline, row: StepRow) -> Reason:
    """The likely reason that the engine's step for a token was slow."""
    worker = _worker(timeline, "decode_worker", "the decode worker")
    usual_s = median(other.busy_s / other.num_steps for other in timeline.decode_steps)
    usually = f" (its usual step took {usual_s * 1e3:.0f} ms)"
    others = row.num_prompt_tokens - (row.num_computed if row.recomputes else 0)
    if others > 1:
        return Reason(
            f"the same step of {worker} computed {others:.0f} prompt tokens of other requests, for local prefill or "
            f"after a preemption or a failure{usually}",
            "A smaller decode.chunk_tokens, or an SLO class with a TPOT target, splits such work into shorter steps; "
            "routing.local_prefill: never keeps prompts on prefill workers; a larger KV cache (decode.kv_blocks or "
            "kv_memory_gib) avoids preemptions.",
        )
    if row.draft_s > row.busy_s / 2:
        return Reason(
            f"the step of {worker} spent {row.draft_s * 1e3:.0f} ms on drafting tokens{usually}",
            "Use a cheaper speculation.method, lower speculation.max_draft_tokens, or disable speculation.",
        )
    clause = f"one step of {worker} over {_count(int(row.num_sequences), 'sequence')} and "
    clause += f"{_count(int(row.num_batch_tokens), 'token')}{usually}"
    if row.num_sequences <= 1:
        return Reason(clause, f"{_SHORT_STEP} Speculation gives several tokens per step.")
    return Reason(
        clause,
        "Smaller batches (decode.max_num_seqs) or more decode workers (`baton scale decode=N`) make steps shorter. If "
        "other steps of the same size were quick, the machine was short of CPU time.",
    )


def wait_reason(timeline: Timeline, row: StepRow, before: StepRow) -> Reason:
    """The likely reason for the time between two steps of a sequence."""
    worker = _worker(timeline, "decode_worker", "the decode worker")
    failures = timeline.failed_attempts
    between = [attempt for attempt in failures if before.received_s <= attempt.failed_s <= row.received_s]
    if between:  # step numbers of different workers do not compare
        return _retry(timeline, between)
    skipped = int(row.step_index - before.step_index - row.num_steps)
    if skipped > 0:
        return Reason(
            f"{worker} ran {_count(skipped, 'step')} without it, because other sequences used the "
            "step's budget or the KV "
            "blocks",
            "Raise decode.chunk_tokens, enlarge the KV cache (decode.kv_blocks), or add decode workers "
            "(`baton scale decode=N`).",
        )
    return Reason(
        f"{worker} ran no step: between two steps, it adds and removes requests and their KV, which needs CPU time",
        "On one machine, prefill and decode workers share the cores (engine.threads). Otherwise, check the CPU load "
        "of the worker's process.",
    )


def _is_local(timeline: Timeline) -> bool:
    """Whether the decode worker computed the prompt."""
    return "prefill_worker" not in timeline.attributes and "decode_worker" in timeline.attributes


def _computing_worker(timeline: Timeline) -> str:
    pool = _computing_pool(timeline)
    worker = _worker(timeline, f"{pool}_worker", f"the {pool} worker")
    return _worker(timeline, "local_worker", worker) if pool == "decode" else worker  # another one may have taken over


def _computing_pool(timeline: Timeline) -> str:
    return "decode" if _is_local(timeline) else "prefill"


def _worker(timeline: Timeline, attribute: str, otherwise: str) -> str:
    return str(timeline.attributes.get(attribute, otherwise))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
