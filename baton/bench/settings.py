"""What the options of ``baton bench serve`` and ``sweep`` say about the target and the requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from baton.bench.scaling import AUTO_SCALE
from baton.bench.traces import AUTO_FORMAT
from baton.core.option_text import check_not_negative, check_over_zero

DEFAULT_INPUT = "lognormal:median=200,p95=800"
DEFAULT_OUTPUT = "lognormal:median=64,p95=200"


@dataclass(frozen=True, slots=True)
class TargetSettings:
    """
    Attributes:
        url: base URL; None for the cluster that ``baton up`` runs here.
        model: name of the served model; None for the first that the server lists.
        chat: ask for chats, through the chat template; else for completions.
        tokenizer: a model's name, hub id or folder; None for the one of the served model.
        exact_lengths: ask for answers of exactly the wanted length.
        service_tier: what requests ask for by that name, with baton an SLO class; None: nothing.
        extra_body: a JSON object that is laid over every request's body.
        timeout_s: of each request.
    """

    url: str | None = None
    model: str | None = None
    chat: bool = False
    api_key: str | None = field(default=None, repr=False)
    tokenizer: str | None = None
    temperature: float = 0.0
    exact_lengths: bool = True
    service_tier: str | None = None
    extra_body: str = ""
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        check_not_negative("--temperature", self.temperature)
        check_over_zero("--timeout", self.timeout_s)


@dataclass(frozen=True, slots=True)
class WorkloadSettings:
    """
    Attributes:
        input, output: see :func:`baton.bench.lengths.parse_lengths`.
        prompts: JSONL of prompts, instead of ``input``.
        trace: lengths and shared prefixes of recorded traffic, instead of ``input`` and ``output``.
        trace_format: see :func:`baton.bench.traces.read_trace`.
        trace_start_s, trace_seconds: the part of the trace that is used, on its own clock.
        input_scale: a factor, or ``auto``; see :mod:`baton.bench.scaling`, also for the limits.
        prefix_tokens, prefix_groups: of synthetic prompts.
        seed: of lengths, their order and the arrivals. The same seed gives the same load.
        salt: of the prompts' text. None for another in every run, so that no cache knows it from an earlier one.
    """

    input: str = DEFAULT_INPUT
    output: str = DEFAULT_OUTPUT
    prompts: Path | None = None
    trace: Path | None = None
    trace_format: str = AUTO_FORMAT
    trace_start_s: float = 0.0
    trace_seconds: float | None = None
    input_scale: str = "1"
    output_scale: float = 1.0
    max_input: int | None = None
    max_output: int | None = None
    context: int | None = None
    prefix_tokens: int = 0
    prefix_groups: int = 1
    seed: int = 0
    salt: str | None = None

    def __post_init__(self) -> None:
        check_not_negative("--trace-start", self.trace_start_s)
        if self.trace_seconds is not None:
            check_over_zero("--trace-seconds", self.trace_seconds)

    @property
    def scales_to_longest(self) -> bool:
        return self.input_scale == AUTO_SCALE
