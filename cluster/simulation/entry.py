"""``baton simulate``: from its options to a replay and its report."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType

from baton.bench.document import check_writable
from baton.bench.traces import cut_trace, read_trace
from baton.core.errors import ConfigError
from baton.core.files import writing
from baton.core.option_text import check_positive, key_values, known_name, positive_number
from cluster.config.config import BatonConfig, load_config
from cluster.simulation.compare import compare, comparison_table, measured_requests, read_stage
from cluster.simulation.fitting import fitted_profile, newest_fits, profile_text
from cluster.simulation.options import SimulateOptions
from cluster.simulation.profile import DEFAULT_PROFILE, TimingProfile, load_profile, profile_names
from cluster.simulation.replay import ReplaySettings, replay
from cluster.simulation.report import table
from cluster.simulation.schedule import parse_schedule
from cluster.simulation.settings import longest_request
from cluster.simulation.workload import Arrival, make_arrivals, repeat_arrivals

ROUTERS: Mapping[str, Mapping[str, Any]] = {
    "baton": {},
    "round_robin": {"routing.picker": "round_robin", "routing.local_prefill": "never", "admission.mode": "off"},
}
"""Configuration overrides by value of ``--router``."""
_OF_TRACES = (
    "rate_scale", "input_scale", "output_scale", "requests",
    "trace_format", "trace_start_s", "trace_seconds", "warmup_s",
)  # fmt: skip
"""Options that only apply to requests of a trace."""


@dataclass(frozen=True, slots=True)
class _Requests:
    """The requests to replay.

    Attributes:
        warmup_s: seconds from the start in which requests do not count.
        num_left_out: requests of a real run that cannot be repeated.
    """

    arrivals: list[Arrival]
    warmup_s: float
    num_left_out: int = 0

    @property
    def num_cut(self) -> int:
        return sum(arrival.is_cut for arrival in self.arrivals)

    def notes(self) -> Iterator[str]:
        """Notes on left out and shortened requests."""
        if self.num_left_out:
            yield f"{self.num_left_out} requests of the real run are left out, because their lengths are unknown"
        if self.num_cut:
            yield (
                f"{self.num_cut} of {len(self.arrivals)} prompts are shortened: they do not fit into the "
                "context with their answers"
            )


def simulate(options: SimulateOptions, report: Callable[[str], None]) -> RenderableType:
    """Replays a trace or a real run in virtual time. Returns the report to show.

    Raises:
        BatonError: an option is invalid or cannot be simulated.
    """
    if options.trace_seconds is not None:
        check_positive("--trace-seconds", options.trace_seconds)
    if options.stage is not None and options.compare_with is None:
        raise ConfigError(
            "--stage names a stage of the report of --compare-with. Add --compare-with, or leave out --stage."
        )
    if options.with_samples and options.json_file is None:
        raise ConfigError("--samples writes every request to the file of --json. Add --json, or leave out --samples.")
    if options.json_file is not None:
        check_writable("--json", options.json_file)
    config, profile, name = _config_of(options)
    if name is None:
        report(
            f"no profile is given, so workers use {DEFAULT_PROFILE}; choose one with --profile or "
            f"simulation.profile: {', '.join(profile_names())}, or a YAML file"
        )
    stage = None if options.compare_with is None else read_stage(options.compare_with, options.stage)
    report("reading the requests")
    requests = _requests_of(options, config, profile, stage)
    for note in requests.notes():
        report(note)
    report(f"replaying {len(requests.arrivals)} requests")
    result = replay(config, profile, requests.arrivals, ReplaySettings(requests.warmup_s))
    document = result.document
    document["replay"] |= {"cut_prompts": requests.num_cut, "left_out": requests.num_left_out}
    document["settings"] = {"config": config.to_dict(), "profile": profile.model_dump(mode="json"), **options.to_dict()}
    shown: list[RenderableType] = [table(document)]
    if stage is not None:
        document["comparison"] = compare(stage, result.requests, requests.arrivals[-1].at_s - requests.warmup_s)
        shown.append(comparison_table(document["comparison"]))
    if options.with_samples:
        document["requests"] = [asdict(request) for request in result.requests]
    if options.json_file is not None:
        with writing(options.json_file):
            options.json_file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return Group(*shown)


def fit_profile(options: SimulateOptions, file: Path) -> str:
    """Writes a profile with the step costs of this machine's real workers. Returns a description.

    Raises:
        ConfigError: there are no measured costs, the file cannot be written, or an option is for a replay.
    """
    if given := options.given_for_a_replay():
        raise ConfigError(f"--fit writes a profile and replays nothing, so leave out {', '.join(given)}.")
    check_writable("--fit", file)
    _, base, name = _config_of(options)
    text = profile_text(fitted_profile(base, newest_fits()))
    with writing(file):
        file.write_text(text, encoding="utf-8")
    return (
        f"{file}: step costs of real workers; everything else comes from the profile {name or DEFAULT_PROFILE}.\n{text}"
    )


def _config_of(options: SimulateOptions) -> tuple[BatonConfig, TimingProfile, str | None]:
    """Returns configuration, profile and the profile's name, which is ``None`` if no option names one."""
    router = known_name("--router", options.router, ROUTERS)
    config = load_config(options.config, {**ROUTERS[router], **options.overrides})
    name = options.profile or config.simulation.profile
    return config, load_profile(name or DEFAULT_PROFILE), name


def _requests_of(
    options: SimulateOptions, config: BatonConfig, profile: TimingProfile, stage: Mapping[str, Any] | None
) -> _Requests:
    shares = _shares(options.slo_class, config)
    if options.trace is None:
        if stage is None:
            raise ConfigError(
                "No requests are given: expected --trace FILE, or --compare-with and a report that has samples."
            )
        _check_repeatable(options, shares)
        measured, num_left_out = measured_requests(stage)
        warmup_s = next((request.at_s for request in measured if not request.is_warmup), 0.0)
        return _Requests(repeat_arrivals(measured, next(iter(shares)), options.seed), warmup_s, num_left_out)
    trace = cut_trace(read_trace(options.trace, options.trace_format), options.trace_start_s, options.trace_seconds)
    arrivals = make_arrivals(
        trace,
        rate_scale=parse_schedule("--rate-scale", options.rate_scale),
        input_scale=parse_schedule("--input-scale", options.input_scale),
        output_scale=parse_schedule("--output-scale", options.output_scale),
        num_requests=options.requests,
        shares=shares,
        max_tokens=longest_request(config, profile),
        seed=options.seed,
    )
    if arrivals[-1].at_s < options.warmup_s:
        raise ConfigError(
            f"--warmup {options.warmup_s:g} leaves out every request: the last one arrives after "
            f"{arrivals[-1].at_s:.1f} "
            "s of virtual time. Lower --warmup, or send more requests (--requests, --trace-seconds)."
        )
    return _Requests(arrivals, options.warmup_s)


def _check_repeatable(options: SimulateOptions, shares: Mapping[str, float]) -> None:
    """Refuses options without effect, since the requests of a real run are repeated unchanged."""
    given = options.given(_OF_TRACES)
    if len(shares) > 1:
        given.append("--class with shares")
    if given:
        raise ConfigError(
            "Without --trace, the requests of --compare-with are replayed unchanged, so "
            f"{', '.join(given)} cannot be used. "
            "Give the trace that was sent with --trace, or leave these options out."
        )


def _shares(text: str, config: BatonConfig) -> dict[str, float]:
    """Parses ``"interactive=1,batch=3"`` or the name of one class. An empty text means the default class."""
    known = [slo.name for slo in config.slo.to_classes().all]
    if not text:
        return {config.slo.default: 1.0}
    if "=" not in text:
        return {known_name("--class", text, known): 1.0}
    shares = key_values("--class", text, known)
    return {name: positive_number(f"--class {name}", value) for name, value in shares.items()}
