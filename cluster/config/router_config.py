"""The configuration section ``router``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from baton.core.config_section import NonEmptyString, PositiveInt, PositiveSeconds, Section
from cluster.gateway.api_keys import ApiKeyConfig
from cluster.gateway.formats.registry import AUTO, NONE, REASONING_FORMATS, TOOL_FORMATS
from cluster.gateway.origins import host_of, is_origin
from cluster.gateway.tls import TlsConfig


class RouterConfig(Section):
    """The HTTP endpoint and the limits of what it accepts."""

    host: NonEmptyString = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65_535)] = 8000
    """0 takes any free port."""
    replicas: Annotated[int, Field(ge=1, le=16)] = 1
    """Processes that serve the endpoint, on the same port of the same machine; each may use a core."""
    max_inflight: PositiveInt = 1024
    """Further requests get 429."""
    max_body_bytes: Annotated[int, Field(ge=1024)] = 8 * 1024 * 1024
    """Larger HTTP bodies get 413."""
    max_connections: PositiveInt | None = None
    """Further connections get 503; null: three quarters of the files that the process may open, at most 16384."""
    keep_alive_s: Annotated[float, Field(gt=0, le=3600)] = 90.0
    """How long an idle connection stays open."""
    request_timeout_s: PositiveSeconds = 600.0
    max_attempts: PositiveInt = 3
    """How many attempts in a row may fail without a token in between, before the failure reaches the client."""
    worker_wait_s: Annotated[float, Field(ge=0, le=3600)] = 30.0
    """How long a request waits while a pool has no available worker, for example during a restart."""
    unknown_parameters: Literal["refuse", "ignore"] = "refuse"
    """What happens to parameters of requests that no API documents; see docs/parameters.md."""
    special_tokens_in_content: Literal["parse", "text"] = "parse"
    """Whether special tokens in the content of messages, such as <|im_end|>, are control tokens or ordinary text."""
    timelines_kept: Annotated[int, Field(ge=0)] = 1000
    """Number of finished requests whose timelines are kept."""
    api_keys: list[ApiKeyConfig] = Field(default_factory=list)
    """Requests must present one of these keys, but for /health and ``open_paths``; empty: no key is required."""
    open_paths: list[Literal["/", "/ready", "/metrics"]] = Field(default_factory=list)
    """With API keys: what else needs no key, such as for a probe or a Prometheus that cannot send one."""
    tls: TlsConfig | None = None
    """Encrypts the endpoint; null: plain HTTP."""
    allowed_hosts: list[NonEmptyString] = Field(default_factory=list)
    """Without API keys: further hosts that clients may use in Host, and whose web pages may use the endpoint."""

    cors_origins: list[NonEmptyString] = Field(default_factory=list)
    """Origins such as https://chat.example.com whose web pages may use the endpoint and read its answers (CORS); "*"
    means all, and needs API keys."""
    page: bool = True
    """Whether browsers get a page at ``/``; programs get JSON there in any case."""
    tool_parser: NonEmptyString = AUTO
    """How the model writes tool calls (docs/tools.md); none: tools are refused."""
    reasoning_parser: NonEmptyString = AUTO
    """How the model marks its reasoning; none: it is content."""

    @field_validator("tool_parser")
    @classmethod
    def _known_tool_format(cls, name: str) -> str:
        return _known(name, TOOL_FORMATS)

    @field_validator("reasoning_parser")
    @classmethod
    def _known_reasoning_format(cls, name: str) -> str:
        return _known(name, REASONING_FORMATS)

    @field_validator("cors_origins")
    @classmethod
    def _origins(cls, origins: list[str]) -> list[str]:
        for origin in origins:
            if origin != "*" and not is_origin(origin):
                raise ValueError(
                    f"{origin!r} is not an origin; expected one such as https://chat.example.com:8443, or *"
                )
        return [origin.lower() for origin in origins]

    @model_validator(mode="after")
    def _no_open_door(self) -> RouterConfig:
        if "*" in self.cors_origins and not self.api_keys:
            raise ValueError("cors_origins: * lets every web page use this endpoint; set api_keys, or name the origins")
        return self

    @field_validator("allowed_hosts")
    @classmethod
    def _names_without_port(cls, names: list[str]) -> list[str]:
        for name in names:
            if host_of(name) is None or ":" in name.rpartition("]")[2]:
                raise ValueError(
                    f"{name!r} is not a host; expected a name or an address without scheme and port, such as"
                    " baton.example.com or [2001:db8::1]"
                )
        return names


def _known(name: str, formats: Iterable[str]) -> str:
    if name not in (names := (AUTO, NONE, *formats)):
        raise ValueError(f"{name!r} is not a known format; expected one of {', '.join(names)}")
    return name
