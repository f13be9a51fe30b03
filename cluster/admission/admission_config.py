"""The section ``admission`` of the configuration: admission control under overload."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from baton.core.config_section import Duration, PositiveInt, Section


class AdmissionConfig(Section):
    """Admission by the predicted latency of a request."""

    mode: Literal["slo", "off"] = "slo"
    """slo: a request is dispatched if its targets can be met, and otherwise waits or is refused. off: every request is
    dispatched at once, and ``router.max_inflight`` is the only limit."""
    max_queued: PositiveInt = 1000
    """Largest number of waiting sequences. When the queue is full, the least urgent one is refused."""
    fair_share: Annotated[float, Field(ge=0, le=0.25)] = 0.05
    """Share of the dispatches for each waiting class while classes of higher priority are served; 0 disables it."""
    patience: Duration = 300.0
    """A request that is later than its TTFT target by this much is raised by one priority."""
    slack: Annotated[float, Field(ge=0, le=10)] = 0.5
    """Every target allows at least the predicted latency on an idle cluster plus this share of it."""
    gather_ms: Annotated[float, Field(ge=0, le=1000)] = 20.0
    """Longest time that a prompt is held to share its prefill step with others; 0: prompts are never held."""
    gather_share: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Largest share of the time left to its TTFT target for which a prompt is held."""
    gather_for: Literal["latency", "throughput"] = "latency"
    """latency: hold a prompt only if that lowers the latency of both on average. throughput: also if it only saves
    steps, so that more requests fit."""
