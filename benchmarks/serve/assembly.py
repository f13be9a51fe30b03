"""The workload that the options ask for, with prompts as the target counts them."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.serve.discovery import count_prompt, find_tokenizer_aside
from benchmarks.serve.endpoint import Endpoint
from benchmarks.serve.lengths import parse_lengths
from benchmarks.serve.prompts import COMMON_WORDS, PromptWriter, calibrated_writer, sample_texts, writer_for_tokenizer
from benchmarks.serve.scaling import LengthLimits, check_room, make_limits, scale_to_longest
from benchmarks.serve.settings import TargetSettings, WorkloadSettings
from benchmarks.serve.traces import TraceRequest, cut_trace, read_trace
from benchmarks.serve.workload import FileWorkload, SyntheticWorkload, TraceWorkload, Workload, read_prompts
from engine.errors import ConfigError


@dataclass(frozen=True, slots=True)
class AssembledWorkload:
    """
    Attributes:
        counting: how prompts got their lengths, JSON-ready.
        notes: what holds for all figures.
    """

    workload: Workload
    counting: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def load_trace(settings: WorkloadSettings) -> list[TraceRequest] | None:
    """The part of the trace that is asked for; None without one.

    Raises:
        ConfigError: see :func:`benchmarks.serve.traces.read_trace`.
    """
    if settings.trace is None:
        return None
    trace = read_trace(settings.trace, settings.trace_format)
    return cut_trace(trace, settings.trace_start_s, settings.trace_seconds)


def make_settled_limits(settings: WorkloadSettings, trace: Sequence[TraceRequest] | None) -> LengthLimits:
    """
    Raises:
        ConfigError: options that do not go together, or leave nothing.
    """
    limits = make_limits(
        settings.input_scale, settings.output_scale, settings.max_input, settings.max_output, settings.context
    )
    if not settings.scales_to_longest:
        return limits
    if trace is None:
        raise ConfigError("--input-scale auto goes with --trace. Give a factor.")
    return scale_to_longest(limits, [request.input_tokens for request in trace])


async def assemble_workload(
    target: TargetSettings, settings: WorkloadSettings, endpoint: Endpoint, trace: Sequence[TraceRequest] | None
) -> AssembledWorkload:
    """Prompts from a file, a trace, or distributions; whichever is asked for.

    Raises:
        BatonError: an option cannot be used, or nobody can count tokens.
    """
    if settings.trace is not None and settings.prompts is not None:
        raise ConfigError("--trace and --prompts both say what is sent. Give one of them.")
    if settings.prefix_tokens < 0 or settings.prefix_groups < 1:
        raise ConfigError("--prefix-tokens must not be under 0, and --prefix-groups must be at least 1.")
    limits = make_settled_limits(settings, trace)
    output_lengths = parse_lengths("--output", settings.output)
    input_lengths = parse_lengths("--input", settings.input)
    if settings.prompts is not None:
        check_room(limits, 1.0, output_lengths.mean(), endpoint.max_model_len)
        prompts = read_prompts(settings.prompts)
        notes = ["--prompts are sent as they are, in every run: a prefix cache may know them"]
        workload = FileWorkload(prompts, output_lengths, limits, settings.seed, settings.prompts.name)
        return AssembledWorkload(workload, notes=notes)
    if trace is None:
        check_room(limits, input_lengths.mean(), output_lengths.mean(), endpoint.max_model_len)
    else:
        # Of recorded traffic some requests may fit and others not: the server says which.
        check_room(limits, max(request.input_tokens for request in trace), 1.0, None)
    writer = await _make_writer(target, settings, endpoint)
    counting = {
        "tokenizer": writer.source,
        "tokens_per_word": writer.tokens_per_word,
        "prompt_overhead": writer.overhead,
    }
    notes = [] if writer.is_exact else [f"prompt lengths are approximate: {writer.source}"]
    if settings.trace is not None and trace is not None:
        return AssembledWorkload(TraceWorkload(writer, trace, limits, settings.trace.name), counting, notes)
    synthetic = SyntheticWorkload(
        writer, input_lengths, output_lengths, limits,
        prefix_tokens=settings.prefix_tokens, prefix_groups=settings.prefix_groups, seed=settings.seed,
    )  # fmt: skip
    return AssembledWorkload(synthetic, counting, notes)


async def _make_writer(target: TargetSettings, settings: WorkloadSettings, endpoint: Endpoint) -> PromptWriter:
    salt = settings.salt or secrets.token_hex(8)
    found = await find_tokenizer_aside(target, endpoint)
    if found is not None:
        tokenizer, name = found
        return writer_for_tokenizer(tokenizer, endpoint.kind, salt, name)
    words = COMMON_WORDS.split()
    counts = [await count_prompt(endpoint, text) for text in sample_texts(words)]
    return calibrated_writer(words, counts, salt, "words, as the server counts them")
