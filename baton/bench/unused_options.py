"""Refuses options that would do nothing: who gave one expects to see it in the figures."""

from __future__ import annotations

from collections.abc import Mapping

from baton.bench.arrivals import BURSTY, TRACE
from baton.bench.settings import WorkloadSettings
from baton.bench.stages import LoadSettings
from baton.core.errors import ConfigError

_PREFIXES = {"prefix_tokens": "--prefix-tokens", "prefix_groups": "--prefix-groups"}
_OF_TRACES = {"trace_format": "--trace-format", "trace_start_s": "--trace-start", "trace_seconds": "--trace-seconds"}
_NOT_OF_TRACES = {"input": "--input", "output": "--output", **_PREFIXES}
_NOT_OF_FILES = {
    "input": "--input",
    "input_scale": "--input-scale",
    "max_input": "--max-input",
    "salt": "--salt",
    **_PREFIXES,
}


def check_all_used(workload: WorkloadSettings, load: LoadSettings, *, is_open: bool) -> None:
    """
    Args:
        is_open: the load is an open loop.

    Raises:
        ConfigError: an option has another value than its default, which nothing would look at.
    """
    if workload.trace is None:
        _refuse(workload, _OF_TRACES, "without --trace")
    else:
        _refuse(workload, _NOT_OF_TRACES, "with --trace, which says what is sent")
    if workload.prompts is not None:
        _refuse(workload, _NOT_OF_FILES, "with --prompts, which are sent as they are")
    if not workload.prefix_tokens:
        _refuse(workload, {"prefix_groups": "--prefix-groups"}, "without --prefix-tokens")
    if load.arrival != BURSTY:
        _refuse(load, {"burstiness": "--burstiness"}, "without --arrival bursty")
    if load.arrival != TRACE:
        _refuse(load, {"speed_up": "--speed-up"}, "without --arrival trace")
    if not is_open:
        _refuse(load, {"max_inflight": "--max-inflight"}, "in a closed loop, where --concurrency is the limit")


def _refuse(settings: WorkloadSettings | LoadSettings, options: Mapping[str, str], where: str) -> None:
    usual = type(settings)()
    if given := [option for name, option in options.items() if getattr(settings, name) != getattr(usual, name)]:
        raise ConfigError(f"{', '.join(given)} would do nothing {where}. Leave that out.")
