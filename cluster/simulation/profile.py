"""What a worker would take: one file for a GPU and a model, written by hand or fitted to a real run."""

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
"""Where nothing names another one, and workers are not really there."""
NonNegative = Annotated[float, Field(ge=0, lt=inf)]


class StepTimes(Section):
    """Milliseconds of an engine step, as :mod:`cluster.latency.latency_model` counts them."""

    fixed: NonNegative
    per_prompt_token: NonNegative
    per_attention_pair: NonNegative
    per_sequence: NonNegative
    per_context_token: NonNegative
    per_drafted_token: NonNegative = 0.0

    @model_validator(mode="after")
    def _takes_time(self) -> StepTimes:
        if self.fixed + self.per_sequence <= 0:
            raise ValueError("a step has to take some time; give fixed or per_sequence a value above zero")
        return self


class TransferCosts(Section):
    """A hand-off."""

    fixed_ms: NonNegative
    bytes_per_second: Annotated[float, Field(gt=0)]
    """That a prefill worker sends, over all of its hand-offs."""


class SpeculationRate(Section):
    """What sequences get from a step of at least so many sequences."""

    batch: PositiveInt
    tokens_per_round: Annotated[float, Field(ge=1, le=64)]
    drafted: Annotated[float, Field(ge=0, le=64)]
    """Tokens drafted for each of them."""

    @model_validator(mode="after")
    def _accepts_what_was_drafted(self) -> SpeculationRate:
        if self.tokens_per_round - 1 > self.drafted:
            needed = self.tokens_per_round - 1
            raise ValueError(f"{self.tokens_per_round} tokens per round need at least {needed:g} drafted ones")
        return self


class TimingProfile(Section):
    """One kind of worker.

    Attributes:
        step: of both pools, unless ``decode_step`` is given for the decode pool.
        delivery_ms: of a request's way to a worker and its first token's way back.
        start_s: that a new worker takes to serve, and ``switch_s`` a drained one to change its role; in virtual time.
        kv_tokens: that its KV cache holds, unless the pool's ``kv_blocks`` says otherwise.
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
    """By batch size, ascending; empty: one token per step."""
    output_tokens: PositiveInt = 128

    @model_validator(mode="after")
    def _ascending(self) -> TimingProfile:
        batches = [rate.batch for rate in self.speculation]
        if batches != sorted(set(batches)):
            raise ValueError("the batches of speculation must ascend")
        return self

    def rates(self, batch: int) -> tuple[float, float]:
        """(tokens, drafted tokens) of each sequence in a step of ``batch`` sequences."""
        best = (1.0, 0.0)
        for rate in self.speculation:
            if rate.batch <= batch:
                best = (rate.tokens_per_round, rate.drafted)
        return best

    def costs(self, pool: str) -> StepCosts:
        """Of a step on a worker of a pool."""
        step = self.decode_step if pool == DECODE and self.decode_step is not None else self.step
        return StepCosts(**step.model_dump())


def profile_names() -> list[str]:
    """Those that come with baton."""
    folder = resources.files("cluster.simulation") / _FOLDER
    return sorted(item.name.removesuffix(_SUFFIX) for item in folder.iterdir() if item.name.endswith(_SUFFIX))


def load_profile(reference: str) -> TimingProfile:
    """
    Args:
        reference: name of a profile that comes with baton, or a YAML or JSON file.

    Raises:
        ConfigError: it is neither, or something in it is wrong.
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
            f"simulation.profile: {reference!r} is no file and no profile of baton's own.{hint} "
            f"These are there: {', '.join(names)}."
        )
    return _read(file)


def _read(file: Path) -> TimingProfile:
    try:
        return TimingProfile.model_validate(read_yaml(file))
    except ValidationError as error:
        raise ConfigError(explain(error, TimingProfile, str(file), ())) from error
