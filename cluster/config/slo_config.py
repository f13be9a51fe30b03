"""The section ``slo`` of the configuration: classes of requests with their targets."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from baton.core.config_section import Duration, DurationOrZero, Section
from baton.core.slo import AUTO_TIER, BUILTIN_CLASSES, BUILTIN_TIERS, DEFAULT_TIER, STANDARD, SloClass, SloClasses

MAX_CLASSES = 16
"""Limit of the number of classes, because each has its own series in the metrics."""

_NAME = re.compile(r"[a-z][a-z0-9_-]{0,31}")
_RESERVED = (AUTO_TIER, DEFAULT_TIER)
_REQUIRED = {"ttft", "tpot"}


class SloClassConfig(Section):
    """One class. See :class:`baton.core.slo.SloClass`."""

    ttft: Duration
    """Target for the time to the first token, queueing included."""
    tpot: Duration
    """Target for the mean time per output token after the first."""
    percentile: Annotated[float, Field(ge=1, le=100)] = 95.0
    """The percentage of requests that should meet both targets."""
    priority: Annotated[int, Field(ge=-1000, le=1000)] = STANDARD.priority
    """Higher values are more urgent."""
    queue_deadline: DurationOrZero = STANDARD.queue_deadline_s
    """How long a request may wait for admission before it is refused; 0s: it may not wait."""


def _built_in(slo: SloClass) -> dict[str, Any]:
    return {
        "ttft": slo.ttft_s,
        "tpot": slo.tpot_s,
        "percentile": slo.percentile,
        "priority": slo.priority,
        "queue_deadline": slo.queue_deadline_s,
    }


class SloConfig(Section):
    """The classes by name, the default class, and the class of each value of OpenAI's ``service_tier``."""

    default: str = STANDARD.name
    classes: dict[str, SloClassConfig] = Field(
        default_factory=lambda: {slo.name: SloClassConfig(**_built_in(slo)) for slo in BUILTIN_CLASSES}
    )
    """Merged into the built-in ``interactive``, ``standard`` and ``batch``, which always exist and keep the values that
    are not given. Further classes need both targets."""
    service_tiers: dict[str, str] = Field(default_factory=lambda: dict(BUILTIN_TIERS))
    """Value of ``service_tier`` → class. ``auto``, ``default`` and the names of classes need no entry and cannot be
    redefined. Without this key: the built-in ``flex`` and ``priority``, unless these are names of classes."""

    @model_validator(mode="before")
    @classmethod
    def _classes_override_built_in_tiers(cls, given: object) -> object:
        if not isinstance(given, Mapping) or "service_tiers" in given:
            return given
        classes = given.get("classes")
        taken = set(BUILTIN_TIERS).intersection(classes if isinstance(classes, Mapping) else ())
        tiers = {tier: name for tier, name in BUILTIN_TIERS.items() if tier not in taken}
        return {**given, "service_tiers": tiers} if taken else given

    @field_validator("classes", mode="before")
    @classmethod
    def _merged_with_built_in(cls, given: object) -> object:
        if given is None:
            given = {}
        if not isinstance(given, Mapping):
            return given
        classes: dict[str, Any] = {slo.name: _built_in(slo) for slo in BUILTIN_CLASSES}
        for name, values in given.items():
            if not isinstance(name, str) or not _NAME.fullmatch(name) or name in _RESERVED:
                raise ValueError(
                    f"{str(name)[:60]!r} is not a valid class name; expected 1 to 32 characters of a-z, 0-9, _ and -, "
                    f"starting with a letter, other than {' and '.join(_RESERVED)}"
                )
            values = {} if values is None else values
            if isinstance(values, Mapping) and name not in classes and not values.keys() >= _REQUIRED:
                near = difflib.get_close_matches(name, classes, 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                missing = " and ".join(sorted(_REQUIRED - values.keys(), reverse=True))
                raise ValueError(
                    f"{name!r} is not a built-in class ({', '.join(classes)}), and a new class needs {missing}{hint}"
                )
            # pydantic reports values that are not mappings.
            classes[name] = {**classes.get(name, {}), **values} if isinstance(values, Mapping) else values
        if len(classes) > MAX_CLASSES:
            raise ValueError(f"at most {MAX_CLASSES} classes are allowed, got {len(classes)} with the built-in ones")
        return classes

    @model_validator(mode="after")
    def _only_known_classes(self) -> SloConfig:
        known = ", ".join(self.classes)
        if self.default not in self.classes:
            raise ValueError(f"default is {self.default!r}, which is not a class; choose one of {known}, or define it")
        for tier, name in self.service_tiers.items():
            if tier in _RESERVED:
                raise ValueError(f"service_tiers cannot redefine {tier}; set slo.default instead")
            if name not in self.classes:
                raise ValueError(f"service_tiers.{tier} is {name!r}, which is not a class; choose one of {known}")
            if tier in self.classes and tier != name:
                raise ValueError(
                    f"service_tiers.{tier} is {name!r}, but {tier} is itself the name of a class; "
                    f"remove the tier, rename it, or change the targets in slo.classes.{tier}"
                )
        return self

    def to_classes(self) -> SloClasses:
        classes = [
            SloClass(name, slo.ttft, slo.tpot, slo.percentile, slo.priority, slo.queue_deadline)
            for name, slo in self.classes.items()
        ]
        return SloClasses(classes, self.default, self.service_tiers)
