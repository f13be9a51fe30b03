"""Builds the workload from the options, with prompt lengths as the target counts them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.bench.discovery import count_prompt, find_tokenizer
from baton.bench.endpoint import Endpoint
from baton.bench.lengths import (
    LengthDistribution,
    LengthLimits,
    check_room,
    make_limits,
    parse_lengths,
    scale_to_longest,
)
from baton.bench.prompts import COMMON_WORDS, PromptWriter, calibrated_writer, sample_texts, writer_for_tokenizer
from baton.bench.settings import TargetSettings, WorkloadSettings
from baton.bench.traces import TraceRequest, cut_trace, read_trace
from baton.bench.workload import FileWorkload, SyntheticWorkload, TraceWorkload, Workload, read_prompts
from baton.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class AssembledWorkload:
    """A workload, ready to send.

    Attributes:
        counting: how prompt tokens were counted; JSON-ready.
        notes: notes on all figures.
    """

    workload: Workload
    counting: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class WorkloadPlan:
    """The requests that the options describe, known before anything is sent.

    Attributes:
        input_lengths, output_lengths: lengths before ``limits``.
        trace: the requested part of the trace; ``None`` without a trace.
        prompts: prompts from a file; ``None`` without a file.
    """

    limits: LengthLimits
    input_lengths: LengthDistribution
    output_lengths: LengthDistribution
    trace: Sequence[TraceRequest] | None
    prompts: Sequence[str] | None

    @property
    def trace_length(self) -> int | None:
        return None if self.trace is None else len(self.trace)


def plan_workload(settings: WorkloadSettings) -> WorkloadPlan:
    """Reads all options and the files that they name.

    Raises:
        ConfigError: options exclude each other or leave no requests, or a file is unusable.
    """
    if settings.trace is not None and settings.prompts is not None:
        raise ConfigError("--trace and --prompts both define the requests. Give one of them.")
    trace = None
    if settings.trace is not None:
        recorded = read_trace(settings.trace, settings.trace_format)
        trace = cut_trace(recorded, settings.trace_start_s, settings.trace_seconds)
    return WorkloadPlan(
        _settled_limits(settings, trace),
        parse_lengths("--input", settings.input),
        parse_lengths("--output", settings.output),
        trace,
        None if settings.prompts is None else read_prompts(settings.prompts),
    )


def _settled_limits(settings: WorkloadSettings, trace: Sequence[TraceRequest] | None) -> LengthLimits:
    limits = make_limits(
        settings.input_scale, settings.output_scale, settings.max_input, settings.max_output, settings.context
    )
    if not settings.scales_to_longest:
        return limits
    if trace is None:
        raise ConfigError("--input-scale auto requires --trace. Add --trace, or give a factor.")
    return scale_to_longest(limits, [request.input_tokens for request in trace])


async def assemble_workload(
    target: TargetSettings,
    settings: WorkloadSettings,
    plan: WorkloadPlan,
    endpoint: Endpoint,
    report: Callable[[str], None],
) -> AssembledWorkload:
    """Assembles the workload from a file, a trace or distributions.

    Args:
        report: called with a line of text before slow steps.

    Raises:
        BatonError: the lengths exceed the model's context, or tokens cannot be counted.
    """
    limits, input_lengths, output_lengths = plan.limits, plan.input_lengths, plan.output_lengths
    if settings.prompts is not None and plan.prompts is not None:
        check_room(limits, 1.0, output_lengths.mean, endpoint.max_model_len)
        notes = ["--prompts are sent unchanged in every run, so prefix caches may hold them"]
        workload = FileWorkload(plan.prompts, output_lengths, limits, settings.seed, settings.prompts.name)
        return AssembledWorkload(workload, notes=notes)
    if plan.trace is None:
        check_room(limits, input_lengths.mean, output_lengths.mean, endpoint.max_model_len)
    else:
        # Some recorded requests may not fit. The server refuses those.
        check_room(limits, max(request.input_tokens for request in plan.trace), 1.0, None)
    writer = await _make_writer(target, settings, endpoint, report)
    counting = {
        "tokenizer": writer.source,
        "tokens_per_word": writer.tokens_per_word,
        "prompt_overhead": writer.overhead,
    }
    notes = [] if writer.is_exact else [f"prompt lengths are approximate: {writer.source}"]
    if settings.trace is not None and plan.trace is not None:
        return AssembledWorkload(TraceWorkload(writer, plan.trace, limits, settings.trace.name), counting, notes)
    synthetic = SyntheticWorkload(writer, input_lengths, output_lengths, limits, settings.seed)
    return AssembledWorkload(synthetic, counting, notes)


async def _make_writer(
    target: TargetSettings, settings: WorkloadSettings, endpoint: Endpoint, report: Callable[[str], None]
) -> PromptWriter:
    salt = settings.salt or secrets.token_hex(8)
    found = await asyncio.to_thread(find_tokenizer, target, endpoint, report)
    if found is not None:
        tokenizer, name = found
        return writer_for_tokenizer(tokenizer, endpoint.kind, salt, name)
    words = COMMON_WORDS.split()
    counts = [await count_prompt(endpoint, text) for text in sample_texts(words)]
    return calibrated_writer(words, counts, salt, "words, counted by the server")
