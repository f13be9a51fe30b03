"""The section ``telemetry`` of the configuration: what is recorded of finished requests."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field, field_validator

from baton.core.config_section import NonEmptyString, PositiveSeconds, Section


class TelemetryConfig(Section):
    """Traces of finished requests for an OpenTelemetry collector, and the shape of the traffic for replays."""

    otlp_endpoint: NonEmptyString | None = None
    """Base URL of a collector that takes OTLP over HTTP; null disables traces."""
    otlp_timeout_s: PositiveSeconds = 10.0
    """Time limit for one batch of spans; spans that the collector does not accept are dropped."""
    service_name: NonEmptyString = "baton"
    """Name of this service in traces."""
    recorded_requests: Annotated[int, Field(ge=0, le=100_000)] = 0
    """Newest sequences whose times, lengths and hashed prefixes each router keeps for ``baton trace export``, 200 bytes
    and 16 for each 512 tokens of prompt; 0 records nothing."""

    @field_validator("otlp_endpoint")
    @classmethod
    def _http_url(cls, endpoint: str | None) -> str | None:
        if endpoint is not None and not re.fullmatch(r"https?://[^/\s]+\S*", endpoint):
            raise ValueError(f"{endpoint!r} is not an http:// or https:// URL; collectors usually listen on port 4318")
        return endpoint
