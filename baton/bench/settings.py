"""Settings of target and workload from the options of ``baton bench serve`` and ``sweep``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from baton.bench.lengths import AUTO_SCALE
from baton.bench.stages import BURSTY, TRACE, LoadSettings
from baton.bench.traces import AUTO_FORMAT
from baton.core.errors import ConfigError
from baton.core.option_text import check_not_negative, check_positive

S = TypeVar("S")

INTERRUPTED_STATUS = 130
"""Exit status by convention of a command that was ended by Ctrl-C."""
DEFAULT_INPUT = "lognormal:median=200,p95=800"
DEFAULT_OUTPUT = "lognormal:median=64,p95=200"


@dataclass(frozen=True, slots=True)
class TargetSettings:
    """Settings of the target.

    Attributes:
        url: base URL; ``None`` means the cluster that ``baton up`` runs here.
        model: name of the served model; ``None`` means the first that the server lists.
        chat: True sends chats, through the chat template; False sends completions.
        tokenizer: a model's name, hub id or folder; ``None`` means that of the served model.
        exact_lengths: ask for answers of exactly the wanted length.
        service_tier: the ``service_tier`` of requests, which names an SLO class of baton; ``None`` sends none.
        extra_body: a JSON object to merge into every request's body.
        timeout_s: time limit of each request.
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
        check_positive("--timeout", self.timeout_s)


@dataclass(frozen=True, slots=True)
class WorkloadSettings:
    """Settings of the workload.

    Attributes:
        input, output: distributions for :func:`baton.bench.lengths.parse_lengths`.
        prompts: JSONL file of prompts, instead of ``input``.
        trace: file with lengths and shared prefixes of recorded traffic, instead of ``input`` and ``output``.
        trace_format: format for :func:`baton.bench.traces.read_trace`.
        trace_start_s, trace_seconds: the used part of the trace, on its own clock.
        input_scale: a factor, or ``auto``; see :class:`baton.bench.lengths.LengthLimits`, also for the limits.
        seed: seed of lengths, their order and the arrivals. The same seed gives the same load.
        salt: salt of the prompts' text. ``None`` means a new one in every run, so that no cache has the prompts.
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
    seed: int = 0
    salt: str | None = None

    def __post_init__(self) -> None:
        check_not_negative("--trace-start", self.trace_start_s)
        if self.trace_seconds is not None:
            check_positive("--trace-seconds", self.trace_seconds)

    @property
    def scales_to_longest(self) -> bool:
        return self.input_scale == AUTO_SCALE


_OF_TRACES = {"trace_format": "--trace-format", "trace_start_s": "--trace-start", "trace_seconds": "--trace-seconds"}
_NOT_OF_TRACES = {"input": "--input", "output": "--output"}
_NOT_OF_FILES = {
    "input": "--input",
    "input_scale": "--input-scale",
    "max_input": "--max-input",
    "salt": "--salt",
}


def check_all_used(workload: WorkloadSettings, load: LoadSettings, *, is_open: bool) -> None:
    """Refuses options that have no effect.

    Args:
        is_open: the load is an open loop.

    Raises:
        ConfigError: an option without effect differs from its default.
    """
    if workload.trace is None:
        _refuse(workload, _OF_TRACES, "without --trace")
    else:
        _refuse(workload, _NOT_OF_TRACES, "with --trace, which defines the requests")
    if workload.prompts is not None:
        _refuse(workload, _NOT_OF_FILES, "with --prompts, which are sent unchanged")
    if load.arrival != BURSTY:
        _refuse(load, {"burstiness": "--burstiness"}, "without --arrival bursty")
    if load.arrival != TRACE:
        _refuse(load, {"speed_up": "--speed-up"}, "without --arrival trace")
    if not is_open:
        _refuse(load, {"max_inflight": "--max-inflight"}, "in a closed loop, where --concurrency is the limit")


def _refuse(settings: WorkloadSettings | LoadSettings, options: Mapping[str, str], where: str) -> None:
    usual = type(settings)()
    if given := [option for name, option in options.items() if getattr(settings, name) != getattr(usual, name)]:
        raise ConfigError(f"{', '.join(given)} would have no effect {where}. Leave it out.")


def load_settings(options: Mapping[str, Any]) -> tuple[TargetSettings, WorkloadSettings, LoadSettings]:
    """The settings that all load commands share."""
    return pick(TargetSettings, options), pick(WorkloadSettings, options), pick(LoadSettings, options)


def pick(kind: type[S], options: Mapping[str, Any]) -> S:
    """Creates settings from the options with their names. Missing options keep the defaults."""
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in options.items() if name in names})
