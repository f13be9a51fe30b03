"""The section ``simulation`` of the configuration: workers that take time instead of computing."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from baton.core.config_section import NonEmptyString, PositiveInt, Section


class SimulationConfig(Section):
    """Simulated workers in place of real ones. See ``docs/simulation.md``."""

    profile: NonEmptyString | None = None
    """What workers take: the name of a profile of baton's, or a YAML file. null: workers are real."""
    workers_per_process: PositiveInt = 32
    tokens_per_message: PositiveInt = 16
    """The most that one message of a stream brings; the first ones bring fewer."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Of the noise of step durations."""
