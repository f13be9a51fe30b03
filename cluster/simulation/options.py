"""The options of ``baton simulate``. The command line derives its options and their help from this model."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from baton.bench.traces import AUTO_FORMAT
from baton.core.config_section import CommandOption, Section, option_name
from cluster.config.config_reading import parse_override

_NOT_FOR_REPLAYS = {"config", "assignments", "profile", "fit"}


class SimulateOptions(Section):
    """Replay traffic against the real router and simulated workers, in virtual time."""

    trace: Annotated[
        Path | None, CommandOption(metavar="FILE"), Field(description="Trace in Mooncake JSONL or Azure CSV.")
    ] = None
    config: Annotated[
        Path | None,
        CommandOption(("-c", "--config")),
        Field(description="YAML configuration file, such as deploy/simulated-64.yaml."),
    ] = None
    assignments: Annotated[
        list[str] | None,
        CommandOption(("--set",), "KEY=VALUE"),
        Field(description="Override one value, such as decode.workers=8."),
    ] = None
    profile: Annotated[
        str | None, Field(description="Name or YAML file of the step durations; replaces simulation.profile.")
    ] = None
    router: Annotated[
        str,
        Field(description="baton (as configured) or round_robin (no local prefill, no admission control)."),
    ] = "baton"
    rate_scale: Annotated[
        str,
        Field(description="Factor of the request rate, such as 2, or by virtual time: 0=1,600=4,1200=1."),
    ] = "1"
    input_scale: Annotated[str, Field(description="Factor of prompt lengths, in the same notation.")] = "1"
    output_scale: Annotated[str, Field(description="Factor of output lengths, in the same notation.")] = "1"
    requests: Annotated[int | None, Field(ge=1, description="Number of requests. Default: the whole trace.")] = None
    trace_format: Annotated[str, Field(description="Format of the trace: auto, mooncake or azure.")] = AUTO_FORMAT
    trace_start_s: Annotated[
        float, CommandOption(("--trace-start",)), Field(ge=0, description="Seconds to skip at the start of the trace.")
    ] = 0
    trace_seconds: Annotated[float | None, Field(description="Seconds of the trace to use. Default: all.")] = None
    slo_class: Annotated[
        str,
        CommandOption(("--class",)),
        Field(description="SLO class of the requests, or shares such as interactive=1,batch=3."),
    ] = ""
    warmup_s: Annotated[
        float,
        CommandOption(("--warmup",)),
        Field(ge=0, description="Virtual seconds at the start that are not measured."),
    ] = 0.0
    seed: Annotated[int, Field(ge=0, description="Seed of prompts and SLO classes.")] = 0
    compare_with: Annotated[
        Path | None,
        CommandOption(metavar="REPORT.json"),
        Field(description="Print the errors relative to a report of `baton bench serve --json`."),
    ] = None
    stage: Annotated[str | None, Field(description="Stage of that report. Required if it has several.")] = None
    fit: Annotated[
        Path | None,
        CommandOption(metavar="FILE"),
        Field(description="Only write a profile with the step costs of real workers, as measured on this machine."),
    ] = None
    with_samples: Annotated[
        bool,
        CommandOption(("--samples/--no-samples",)),
        Field(description="Also write every request to the file of --json."),
    ] = False
    json_file: Annotated[
        Path | None,
        CommandOption(("--json",), "FILE"),
        Field(description="Write all results and settings to this file."),
    ] = None

    @property
    def overrides(self) -> dict[str, Any]:
        """The values of ``--set`` by dotted key."""
        return dict(parse_override(text) for text in self.assignments or ())

    def given(self, names: Collection[str]) -> list[str]:
        """The names of the options among these fields whose values are not the defaults."""
        fields = type(self).model_fields
        return [option_name(type(self), name) for name in names if getattr(self, name) != fields[name].default]

    def given_for_a_replay(self) -> list[str]:
        """The names of the given options that ``--fit`` does not use."""
        return self.given([name for name in type(self).model_fields if name not in _NOT_FOR_REPLAYS])

    def to_dict(self) -> dict[str, Any]:
        """The options that a replay depends on, without configuration and profile; JSON-ready."""
        values = self.model_dump(mode="json", exclude=_NOT_FOR_REPLAYS | {"with_samples", "json_file"})
        return {**values, "class": values.pop("slo_class")}
