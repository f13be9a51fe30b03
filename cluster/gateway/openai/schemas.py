"""Request schemas: the honoured parameters of each endpoint, with strict types.

Types only. What the values mean together with the model is :mod:`cluster.gateway.openai.plan`'s business.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from baton.core.errors import InvalidRequestError
from baton.core.roles import SpeculationMethod
from cluster.gateway.openai.json_body import json_type, shown
from cluster.gateway.openai.parameters import CHAT_IGNORED, COMPLETION_IGNORED, check_ignored, check_known


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    include_usage: bool = False
    continuous_usage_stats: bool = False
    """vLLM's extension: every chunk carries the usage so far."""
    include_obfuscation: bool = False
    """Only false is supported."""


class SpeculationOptions(BaseModel):
    """baton's extension: how to draft for this request."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    method: SpeculationMethod


class BaseRequest(BaseModel):
    """What both endpoints share. Null means absent everywhere, as with OpenAI."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    ignored: ClassVar[frozenset[str]]

    model: str
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    n: int = 1
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] | None = None
    service_tier: str | None = None
    """Names the SLO class; see :meth:`baton.core.slo.SloClasses.choose`."""

    # Extensions that other servers made common.
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    min_tokens: int = 0
    stop_token_ids: list[int] | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    speculation: SpeculationOptions | None = None
    return_token_ids: bool = False
    """Every choice carries ``token_ids``, the exact tokens behind its text."""

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class CompletionRequest(BaseRequest):
    ignored: ClassVar[frozenset[str]] = COMPLETION_IGNORED

    prompt: Any
    """A string, token ids, or an array of either; see :func:`cluster.gateway.openai.prompts.split_prompts`."""
    logprobs: int | None = None
    echo: bool = False
    best_of: int | None = None
    add_special_tokens: bool = True


class ChatCompletionRequest(BaseRequest):
    ignored: ClassVar[frozenset[str]] = CHAT_IGNORED

    messages: list[Any]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    add_special_tokens: bool = False
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


RequestT = TypeVar("RequestT", bound=BaseRequest)

_EXPECTED_TYPES = {
    "bool_type": "a boolean",
    "int_type": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "a string",
    "list_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}


def parse_request(schema: type[RequestT], body: Mapping[str, Any]) -> RequestT:
    """The request that ``body`` describes.

    Raises:
        InvalidRequestError: an unknown, missing or mistyped parameter, or one whose value is not supported.
    """
    check_known(body, schema.model_fields.keys() | schema.ignored)
    given = {name: value for name, value in body.items() if value is not None}
    check_ignored({name: value for name, value in given.items() if name in schema.ignored})
    if isinstance(options := given.get("stream_options"), dict):
        check_known(options, StreamOptions.model_fields, "parameter in stream_options")
        given["stream_options"] = {name: value for name, value in options.items() if value is not None}
    if isinstance(options := given.get("speculation"), dict):
        check_known(options, SpeculationOptions.model_fields, "parameter in speculation")
    try:
        return schema.model_validate({name: value for name, value in given.items() if name not in schema.ignored})
    except ValidationError as error:
        raise _explain(error) from error


def _explain(error: ValidationError) -> InvalidRequestError:
    """The first complaint in words; pydantic's own text would speak of its classes."""
    details = error.errors(include_url=False, include_context=False)
    first = details[0]
    name = str(first["loc"][0])
    path = ".".join(str(part) for part in first["loc"])
    if first["type"] == "missing":
        return InvalidRequestError(f"The required parameter {path[:100]} is missing.", param=name)
    if name == "stop":
        return InvalidRequestError("stop must be a string or an array of strings.", param=name)
    if first["type"] == "literal_error":
        choices = first["msg"].removeprefix("Input should be ")
        return InvalidRequestError(f"{path[:100]} must be {choices}, got {shown(first['input'])}.", param=name)
    if first["type"] == "int_type" and _is_huge_integer(first["input"]):
        return InvalidRequestError(
            f"{path[:100]} must be an integer between -2^63 and 2^63 - 1, got {shown(first['input'])}.", param=name
        )
    expected = _EXPECTED_TYPES.get(first["type"])
    if expected is None:
        return InvalidRequestError(f"{path[:100]} is not valid: {first['msg']}.", param=name)
    value = first["input"]
    return InvalidRequestError(f"{path[:100]} must be {expected}, got {json_type(value)} ({shown(value)}).", param=name)


def _is_huge_integer(value: object) -> bool:
    """Whether ``value`` is what orjson makes of an integer beyond 64 bits: a float."""
    return isinstance(value, float) and abs(value) >= 2.0**63
