"""The measured OpenAI-compatible endpoint, and the body of its requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from baton.client.router_client import is_loopback


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """One request before it is sent.

    Attributes:
        prompt: text of the prompt.
        input_tokens: intended tokens of the prompt; ``None`` if unknown.
        output_tokens: intended tokens of the answer.
        at_s: arrival in seconds since the start of the trace; ``None`` without a trace.
        is_clipped: True if a limit cut the prompt or the answer.
    """

    prompt: str
    input_tokens: int | None
    output_tokens: int
    at_s: float | None = None
    is_clipped: bool = False


CHAT = "chat"
COMPLETIONS = "completions"
_PATHS: Mapping[str, str] = {CHAT: "/chat/completions", COMPLETIONS: "/completions"}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The destination of requests, and their common parameters.

    Attributes:
        base_url: URL with ``/v1`` or the server's own prefix, without a trailing slash.
        model: name of the served model.
        kind: ``chat`` or ``completions``.
        api_key: sent as a bearer token and never shown; ``None`` sends none.
        temperature: 0 is greedy.
        exact_lengths: ask for answers of exactly the wanted length, with ``ignore_eos`` and ``min_tokens``.
        requests_usage: ask for token counts at the end of a stream, with ``stream_options.include_usage``.
        service_tier: sent with every request; ``None`` sends none.
        extra_body: merged into the body of every request.
        max_model_len: limit of prompt and answer tokens together; ``None`` if the server does not report it.
    """

    base_url: str
    model: str
    kind: str = COMPLETIONS
    api_key: str | None = field(default=None, repr=False)
    temperature: float = 0.0
    exact_lengths: bool = True
    requests_usage: bool = True
    service_tier: str | None = None
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    max_model_len: int | None = None

    @property
    def generate_url(self) -> str:
        return self.base_url + _PATHS[self.kind]

    @property
    def models_url(self) -> str:
        return f"{self.base_url}/models"

    @property
    def headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        return headers | {"Authorization": f"Bearer {self.api_key}"} if self.api_key else headers

    @property
    def is_loopback(self) -> bool:
        """Whether the endpoint is on the loopback interface, which proxies cannot reach."""
        return is_loopback(self.base_url)

    def body(self, spec: RequestSpec) -> bytes:
        """The request as JSON."""
        values: dict[str, Any] = {
            "model": self.model,
            "max_tokens": spec.output_tokens,
            "temperature": self.temperature,
            "stream": True,
        }
        if self.kind == CHAT:
            values["messages"] = [{"role": "user", "content": spec.prompt}]
        else:
            values["prompt"] = spec.prompt
        if self.service_tier is not None:
            values["service_tier"] = self.service_tier
        if self.requests_usage:
            values["stream_options"] = {"include_usage": True}
        if self.exact_lengths:
            values |= {"ignore_eos": True, "min_tokens": spec.output_tokens}
        return orjson.dumps(values | dict(self.extra_body))
