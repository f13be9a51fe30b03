"""The section ``telemetry`` of the configuration: traces of finished requests."""

from __future__ import annotations

import re

from pydantic import field_validator

from baton.core.config_section import NonEmptyString, PositiveSeconds, Section


class TelemetryConfig(Section):
    """Traces of finished requests for an OpenTelemetry collector."""

    otlp_endpoint: NonEmptyString | None = None
    """Base URL of a collector that takes OTLP over HTTP; null disables traces."""
    otlp_timeout_s: PositiveSeconds = 10.0
    """Time limit for one batch of spans; spans that the collector does not accept are dropped."""
    service_name: NonEmptyString = "baton"
    """Name of this service in traces."""

    @field_validator("otlp_endpoint")
    @classmethod
    def _http_url(cls, endpoint: str | None) -> str | None:
        if endpoint is not None and not re.fullmatch(r"https?://[^/\s]+\S*", endpoint):
            raise ValueError(f"{endpoint!r} is not an http:// or https:// URL; collectors usually listen on port 4318")
        return endpoint
