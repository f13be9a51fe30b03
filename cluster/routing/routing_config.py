"""The section ``routing`` of the configuration: the choice of workers for a request."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from baton.core.config_section import PositiveInt, Section
from cluster.routing.filters import FILTERS
from cluster.routing.pickers import PICKERS
from cluster.routing.scorers import SCORERS

DEFAULT_WEIGHTS: Mapping[str, float] = {
    "slo_headroom": 4.0,
    "predicted_ttft": 1.0,
    "predicted_tpot": 1.0,
    "prefix_affinity": 1.0,
    "queue_depth": 0.25,
    "kv_use": 0.25,
    "least_loaded": 0.0,
}

Weight = Annotated[float, Field(ge=0, le=1000)]


class RoutingConfig(Section):
    """Filters, weighted scorers and a picker. See ``docs/routing.md``."""

    scorers: dict[str, Weight] = Field(default_factory=lambda: dict(DEFAULT_WEIGHTS))
    """Weights by scorer, merged into the defaults; 0 disables a scorer."""
    filters: list[str] = Field(default_factory=lambda: list(FILTERS))
    """Names of the filters that leave out workers."""
    picker: str = "best_score"
    local_prefill: Literal["auto", "never", "always"] = "auto"
    """Whether decode workers compute prompts themselves: if the scores prefer it, never, or always."""
    scan_limit: PositiveInt = 1024
    """Largest number of worker pairs for which every route is scored."""
    sample: PositiveInt = 12
    """Number of workers of each pool to draw for a request beyond ``scan_limit``."""

    @field_validator("scorers", mode="before")
    @classmethod
    def _merged_with_defaults(cls, given: object) -> object:
        if given is None:
            given = {}
        if not isinstance(given, Mapping):
            return given
        _check_names("scorer", given, SCORERS)
        return {**DEFAULT_WEIGHTS, **given}

    @field_validator("filters")
    @classmethod
    def _known_filters(cls, filters: list[str]) -> list[str]:
        _check_names("filter", filters, FILTERS)
        if "accepting" not in filters:
            raise ValueError(
                "the filter accepting is missing; without it, workers that are about to leave would get requests"
            )
        if len(set(filters)) < len(filters):
            twice = next(name for name in FILTERS if filters.count(name) > 1)
            raise ValueError(f"the filter {twice} is listed more than once; list it once")
        # Always in the same order: a filter that keeps the last workers must see only those that earlier filters left.
        return [name for name in FILTERS if name in filters]

    @field_validator("picker")
    @classmethod
    def _known_picker(cls, picker: str) -> str:
        _check_names("picker", [picker], PICKERS)
        return picker

    @model_validator(mode="after")
    def _something_to_score(self) -> RoutingConfig:
        if not any(self.scorers.values()):
            raise ValueError("no scorer has a weight above 0; set at least one weight, such as slo_headroom: 4")
        return self


def _check_names(kind: str, given: Iterable[object], known: Iterable[str]) -> None:
    names = list(known)
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(str(name)[:60], names, n=1, cutoff=0.5)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise ValueError(f"unknown {kind} {str(name)[:60]!r}.{hint} Known {kind}s: {', '.join(names)}")
