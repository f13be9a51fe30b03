"""Timing profiles of workers: one file per GPU and model, written by hand or fitted to a real run."""

from __future__ import annotations

import difflib
from importlib import resources
from math import inf
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError, model_validator

from baton.core.config_section import NonEmptyString, PositiveInt, Section
from baton.core.errors import ConfigError
from baton.core.roles import DECODE
from baton.core.step_costs import StepCosts
from cluster.config.config_reading import explain, read_yaml

_FOLDER = "profiles"
_SUFFIX = ".yaml"
DEFAULT_PROFILE = "h100-8b"
"""Profile of simulations that name none."""
NonNegative = Annotated[float, Field(ge=0, lt=inf)]


class StepTimes(Section):
    """Milliseconds of an engine step, by the terms of :mod:`cluster.latency.latency_model`."""

    fixed: NonNegative
    per_prompt_token: NonNegative
    per_attention_pair: NonNegative
    per_sequence: NonNegative
    per_context_token: NonNegative
    per_drafted_token: NonNegative = 0.0

    @model_validator(mode="after")
    def _takes_time(self) -> StepTimes:
        if self.fixed + self.per_sequence <= 0:
            raise ValueError("a step must take some time; set fixed or per_sequence to a value above zero")
        return self


class TransferCosts(Section):
    """Costs of a hand-off."""

    fixed_ms: NonNegative
    bytes_per_second: Annotated[float, Field(gt=0)]
    """Bandwidth of a prefill worker, shared by all of its hand-offs."""


class SpeculationRate(Section):
    """Speculation in steps of at least ``batch`` sequences."""

    batch: PositiveInt
    tokens_per_round: Annotated[float, Field(ge=1, le=64)]
    drafted: Annotated[float, Field(ge=0, le=64)]
    """Tokens drafted per sequence."""

    @model_validator(mode="after")
    def _accepts_what_was_drafted(self) -> SpeculationRate:
        if self.tokens_per_round - 1 > self.drafted:
            needed = self.tokens_per_round - 1
            raise ValueError(f"{self.tokens_per_round} tokens per round need at least {needed:g} drafted ones")
        return self


class TimingProfile(Section):
    """One kind of worker.

    Attributes:
        step: step times of both pools, unless ``decode_step`` is given for the decode pool.
        delivery_ms: delivery of a request to a worker plus that of the first token back.
        start_s, switch_s: virtual seconds to start a worker, and to change the role of a drained one.
        kv_tokens: tokens that its KV cache holds, unless the pool sets ``kv_blocks``.
        noise: standard deviation of a step's duration, relative to it; log-normal.
        output_tokens: median length of answers that may end by themselves.
    """

    gpu: NonEmptyString
    model: NonEmptyString
    step: StepTimes
    decode_step: StepTimes | None = None
    delivery_ms: NonNegative = 0.0
    start_s: NonNegative = 30.0
    switch_s: NonNegative = 1.0
    transfer: TransferCosts
    kv_tokens: PositiveInt
    kv_bytes_per_token: PositiveInt
    max_model_len: Annotated[int, Field(ge=2)] = 131_072
    noise: Annotated[float, Field(ge=0, le=1)] = 0.03
    speculation: list[SpeculationRate] = Field(default_factory=list)
    """Rates by ascending batch size; empty means one token per step."""
    output_tokens: PositiveInt = 128

    @model_validator(mode="after")
    def _ascending(self) -> TimingProfile:
        batches = [rate.batch for rate in self.speculation]
        if batches != sorted(set(batches)):
            raise ValueError("the batch sizes of speculation must be in ascending order")
        return self

    def rates(self, batch: int) -> tuple[float, float]:
        """Returns (tokens, drafted tokens) per sequence in a step of ``batch`` sequences."""
        best = (1.0, 0.0)
        for rate in self.speculation:
            if rate.batch <= batch:
                best = (rate.tokens_per_round, rate.drafted)
        return best

    def costs(self, pool: str) -> StepCosts:
        """Costs of a step on a worker of a pool."""
        step = self.decode_step if pool == DECODE and self.decode_step is not None else self.step
        return StepCosts(**step.model_dump())


def profile_names() -> list[str]:
    """Names of the profiles that come with baton."""
    folder = resources.files("cluster.simulation") / _FOLDER
    return sorted(item.name.removesuffix(_SUFFIX) for item in folder.iterdir() if item.name.endswith(_SUFFIX))


def load_profile(reference: str) -> TimingProfile:
    """Loads a profile.

    Args:
        reference: name of a profile that comes with baton, or a YAML or JSON file.

    Raises:
        ConfigError: it is neither, or its content is invalid.
    """
    names = profile_names()
    if reference in names:
        with resources.as_file(resources.files("cluster.simulation") / _FOLDER / f"{reference}{_SUFFIX}") as file:
            return _read(file)
    file = Path(reference).expanduser()
    if not file.is_file():
        near = difflib.get_close_matches(reference, names, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"simulation.profile: {reference!r} is neither a file nor a built-in profile.{hint} "
            f"Known profiles: {', '.join(names)}."
        )
    return _read(file)


def _read(file: Path) -> TimingProfile:
    try:
        return TimingProfile.model_validate(read_yaml(file))
    except ValidationError as error:
        raise ConfigError(explain(error, TimingProfile, str(file), ())) from error
