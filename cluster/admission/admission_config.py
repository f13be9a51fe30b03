"""The section ``admission`` of the configuration: who is let in when there is more work than the SLO classes allow."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from baton.core.config_section import Duration, PositiveInt, Section


class AdmissionConfig(Section):
    """Admission by what a request's route would take."""

    mode: Literal["slo", "off"] = "slo"
    """slo: a request goes when its targets would be kept, else it waits or is refused. off: everything goes at once,
    and ``router.max_inflight`` is the only limit."""
    max_queued: PositiveInt = 1000
    """Sequences that wait for room. When it is full, the least urgent one is refused."""
    fair_share: Annotated[float, Field(ge=0, le=0.25)] = 0.05
    """While others of higher priority go, every class that waits gets this share of the dispatches; 0: none."""
    patience: Duration = 300.0
    """Whoever is later than its TTFT target by that much counts as one priority higher."""
    slack: Annotated[float, Field(ge=0, le=10)] = 0.5
    """A target is never closer to what the request would take on an idle cluster than this, as a share of that."""
    gather: bool = True
    """Let a prompt wait some milliseconds for company in its prefill step, when that pays."""
