"""Which figures of the benchmarks' reports the history keeps, and which way each of them should go."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

from baton.core.errors import ConfigError

Document = Mapping[str, Any]
Figures = dict[str, float]

LOWER_IS_BETTER = ("ms", "s", "s_per_gb")
"""Last parts of names; of all others more is better."""


def is_better_lower(name: str) -> bool:
    """Whether a figure with such a name is a time."""
    return name.rsplit(":", 1)[-1] in LOWER_IS_BETTER


def figures_of(document: Document) -> Figures:
    """Of a report that a benchmark wrote with ``--json``; names are ``benchmark/what:unit``.

    Raises:
        ConfigError: no benchmark of the history writes such reports.
    """
    kind = document.get("format", "engine-steps" if {"ceilings", "steps"} <= document.keys() else None)
    if kind not in _READERS:
        raise ConfigError(
            f"A report of the format {kind!r} has no place in the history. Known are: {', '.join(sorted(_READERS))}."
        )
    try:
        return _READERS[kind](document)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ConfigError(f"A report of the format {kind!r} is not whole: {type(error).__name__} {error}.") from error


def _engine_steps(document: Document) -> Figures:
    """Of the first decoder: a step's time, and how close it is to what the machine allowed in the same run."""
    figures: Figures = {}
    for step in document["steps"]:
        case, times = step["case"], next(iter(step["times_ms"].values()))
        name = f"engine/{case['tokens']} x {case['batch']} behind {case['context']}{' tree' if case['tree'] else ''}"
        median_ms = statistics.median(times)
        figures[f"{name}:ms"] = median_ms
        figures[f"{name}:of_limit"] = step["least_ms"] / median_ms
    ceilings = document["ceilings"]
    figures["machine/reads:gb_per_s"] = ceilings["bytes_per_second"] / 1e9
    figures["machine/multiplies:gflop_per_s"] = ceilings["flops_per_second"] / 1e9
    return figures


def _kv_path(document: Document) -> Figures:
    figures = document["figures"]
    return {
        "kv_path/grpc:of_tcp": figures["grpc_of_tcp"],
        "kv_path/grpc:gb_per_s": figures["grpc_gb_per_s"],
        "kv_path/connected:of_tcp": figures["connected_of_tcp"],
        "kv_path/connected:gb_per_s": figures["connected_gb_per_s"],
        "kv_path/striped:of_tcp": figures["striped_of_tcp"],
        "kv_path/striped:gb_per_s": figures["striped_gb_per_s"],
        "kv_path/shared:of_tcp": figures["shared_of_tcp"],
        "kv_path/shared:gb_per_s": figures["shared_gb_per_s"],
        "kv_path/tcp:gb_per_s": figures["tcp_gb_per_s"],
        "kv_path/sender CPU:s_per_gb": figures["grpc_sender_cpu_s_per_gb"],
        "kv_path/receiver CPU:s_per_gb": figures["grpc_receiver_cpu_s_per_gb"],
        "kv_path/connected sender CPU:s_per_gb": figures["connected_sender_cpu_s_per_gb"],
        "kv_path/connected receiver CPU:s_per_gb": figures["connected_receiver_cpu_s_per_gb"],
        "kv_path/shared sender CPU:s_per_gb": figures["shared_sender_cpu_s_per_gb"],
        "kv_path/shared receiver CPU:s_per_gb": figures["shared_receiver_cpu_s_per_gb"],
    }


def _router(document: Document) -> Figures:
    figures: Figures = {}
    for run in document["latency"]:
        name = f"router/{run['workers']}"
        figures[f"{name} added p50:ms"] = run["added_ms"]["p50"]
        figures[f"{name} added p99:ms"] = run["added_ms"]["p99"]
        figures[f"{name} CPU per request:ms"] = run["router_cpu_ms_per_request"]
    for run in document["relay"]:
        figures[f"router/relay, {run['tokens_per_message']} per message:tokens_per_s"] = run["tokens_per_s"]
    return figures


def _startup(document: Document) -> Figures:
    return {f"startup/{name}:s": seconds for name, seconds in document["figures"].items()}


_READERS: Mapping[Any, Callable[[Document], Figures]] = {
    "engine-steps": _engine_steps,
    "baton-kv-path": _kv_path,
    "baton-router-load": _router,
    "baton-startup": _startup,
}
