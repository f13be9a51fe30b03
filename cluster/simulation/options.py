"""The options of ``baton simulate``. The command line derives its options and their help from this model."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from baton.bench.traces import AUTO_FORMAT
from baton.core.config_section import CommandOption, Section, option_name
from cluster.config.config_reading import parse_override

_NOT_OF_A_REPLAY = {"config", "assignments", "profile", "fit"}


class SimulateOptions(Section):
    """Replay traffic against the real router and simulated workers, in virtual time."""

    trace: Annotated[Path | None, CommandOption(metavar="FILE"), Field(description="Mooncake JSONL or Azure CSV.")] = (
        None
    )
    config: Annotated[
        Path | None,
        CommandOption(("-c", "--config")),
        Field(description="YAML file, such as deploy/simulated-64.yaml."),
    ] = None
    assignments: Annotated[
        list[str] | None,
        CommandOption(("--set",), "KEY=VALUE"),
        Field(description="Set one value, e.g. decode.workers=8."),
    ] = None
    profile: Annotated[
        str | None, Field(description="What workers take, instead of simulation.profile: a name or a YAML file.")
    ] = None
    router: Annotated[
        str,
        Field(description="baton: as configured; round_robin: in turn, with neither local prefill nor admission."),
    ] = "baton"
    rate_scale: Annotated[
        str,
        Field(description="How many times as fast as recorded: 2, or by virtual time: 0=1,600=4,1200=1."),
    ] = "1"
    input_scale: Annotated[str, Field(description="Factor of prompt lengths, in the same way.")] = "1"
    output_scale: Annotated[str, Field(description="Factor of answer lengths, in the same way.")] = "1"
    requests: Annotated[int | None, Field(ge=1, description="How many. Default: all of the trace.")] = None
    trace_format: Annotated[str, Field(description="auto, mooncake or azure.")] = AUTO_FORMAT
    trace_start_s: Annotated[
        float, CommandOption(("--trace-start",)), Field(ge=0, description="Seconds of the trace to leave out.")
    ] = 0
    trace_seconds: Annotated[float | None, Field(description="How much of the trace is used. Default: all.")] = None
    slo_class: Annotated[
        str,
        CommandOption(("--class",)),
        Field(description="SLO class of the requests, or shares: interactive=1,batch=3."),
    ] = ""
    warmup_s: Annotated[
        float, CommandOption(("--warmup",)), Field(ge=0, description="Virtual seconds that are left out.")
    ] = 0.0
    seed: Annotated[int, Field(ge=0, description="Of prompts and classes.")] = 0
    compare_with: Annotated[
        Path | None,
        CommandOption(metavar="REPORT.json"),
        Field(description="Print the error against a report of `baton bench serve --json`."),
    ] = None
    stage: Annotated[str | None, Field(description="Which stage of that report.")] = None
    fit: Annotated[
        Path | None,
        CommandOption(metavar="FILE"),
        Field(description="Only write a profile with the step costs of real workers, as learned here."),
    ] = None
    with_samples: Annotated[
        bool,
        CommandOption(("--samples/--no-samples",)),
        Field(description="Write every request into the JSON, too."),
    ] = False
    json_file: Annotated[
        Path | None, CommandOption(("--json",), "FILE"), Field(description="Everything, with all settings.")
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
        return self.given([name for name in type(self).model_fields if name not in _NOT_OF_A_REPLAY])

    def to_dict(self) -> dict[str, Any]:
        """The options that a replay depends on, without configuration and profile; JSON-ready."""
        values = self.model_dump(mode="json", exclude=_NOT_OF_A_REPLAY | {"with_samples", "json_file"})
        return {**values, "class": values.pop("slo_class")}
