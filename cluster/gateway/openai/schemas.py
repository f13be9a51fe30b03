"""Request schemas: the parameters of each endpoint with strict types, and the handling of all others.

A parameter is *honoured* (a field of a request schema), *accepted* (it has no effect, so any value of the right type is
allowed), or *refused by name* unless its value is neutral. Any other parameter is unknown and gets a 400.
:mod:`cluster.gateway.openai.plan` checks values against the model.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from baton.core.errors import InvalidRequestError, UnsupportedParameterError
from baton.core.roles import SpeculationMethod
from cluster.gateway.openai.json_body import json_type, shown


@dataclass(frozen=True, slots=True)
class Rule:
    """The allowed values of a parameter that the engine never sees.

    Attributes:
        allows: True for an allowed value. Null is always allowed and not passed.
        expected: the allowed values, in words.
    """

    allows: Callable[[Any], bool]
    expected: str


def _one_of(*values: object) -> Callable[[Any], bool]:
    return lambda value: any(type(value) is type(known) and value == known for known in values)


_NOTHING = Rule(lambda value: False, "null or absent")
_EMPTY_LIST = Rule(_one_of([]), "absent or an empty array")
_ANY_STRING = Rule(lambda value: isinstance(value, str), "a string")

ACCEPTED: Mapping[str, Rule] = {
    "metadata": Rule(lambda value: isinstance(value, dict), "an object"),
    "priority": Rule(lambda value: type(value) is int, "an integer"),
    "prompt_cache_key": _ANY_STRING,
    "safety_identifier": _ANY_STRING,
    "user": _ANY_STRING,
}
"""Documented parameters that do not affect tokens."""

REFUSED_UNLESS: Mapping[str, Rule] = {
    "audio": _NOTHING,
    "function_call": Rule(_one_of("none", "auto"), '"none" or "auto"'),
    "functions": _EMPTY_LIST,
    "modalities": Rule(_one_of(["text"]), '["text"]'),
    "moderation": _NOTHING,
    "prediction": _NOTHING,
    "prompt_cache_options": Rule(
        lambda value: isinstance(value, dict) and value.keys() <= {"mode"} and value.get("mode") in (None, "implicit"),
        '{"mode": "implicit"}; the prefix cache is automatic and has no time to live',
    ),
    "prompt_cache_retention": Rule(_one_of("in_memory"), '"in_memory"'),
    "store": Rule(_one_of(False), "false, because nothing is stored"),
    "suffix": Rule(_one_of(""), "empty; insertion is not supported"),
    "verbosity": Rule(_one_of("medium"), '"medium"; state the length of the answer in the prompt'),
    "web_search_options": _NOTHING,
}
"""Documented parameters of unsupported features; only neutral values are allowed."""

# Ignored parameters of each endpoint; together with the schema's fields they are all that OpenAI documents.
CHAT_IGNORED = frozenset(ACCEPTED) | (frozenset(REFUSED_UNLESS) - {"suffix"})
# OpenAI documents only `user` and `suffix` here. Clients that share one set of parameters send the rest.
COMPLETION_IGNORED = frozenset(
    {"user", "suffix", "metadata", "store", "priority", "prompt_cache_key", "safety_identifier"}
)

MISNOMERS = {
    "slo_class": "choose an SLO class with 'service_tier', with the header X-Baton-SLO-Class or by the API key.",
}
"""Hints for unknown names whose closest match would mislead."""


def check_known(names: Iterable[str], known: Iterable[str], what: str = "parameter") -> None:
    """Raises :class:`InvalidRequestError` for the first of ``names`` that is not ``known``, with the closest match."""
    known = sorted(known)
    for name in names:
        if name in known:
            continue
        name = name[:60]
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(known)}."
        hint = MISNOMERS.get(name, hint)
        raise InvalidRequestError(f"Unknown {what} {name!r}; {hint}", param=name)


def check_ignored(values: Mapping[str, Any]) -> None:
    """Checks the parameters that are not passed to the engine. Other parameters are not checked.

    Raises:
        UnsupportedParameterError: a value asks for something that is not supported.
        InvalidRequestError: an accepted parameter has the wrong type.
    """
    for name, value in values.items():
        if (rule := ACCEPTED.get(name)) and not rule.allows(value):
            raise InvalidRequestError(f"{name} must be {rule.expected}, got {json_type(value)}.", param=name)
        if (rule := REFUSED_UNLESS.get(name)) and not rule.allows(value):
            raise UnsupportedParameterError(
                f"{name} is not supported with the value {shown(value)}; it must be {rule.expected}.", param=name
            )


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    include_usage: bool = False
    continuous_usage_stats: bool = False
    """vLLM's extension: every chunk carries the usage so far."""
    include_obfuscation: bool = False
    """Only false is supported."""


class SpeculationOptions(BaseModel):
    """baton's extension: the speculation method of this request."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    method: SpeculationMethod


class BaseRequest(BaseModel):
    """The parameters that both endpoints share. Null means absent, as with OpenAI."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    ignored: ClassVar[frozenset[str]]

    model: str | None = None
    """Absent: the model that the endpoint serves."""
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

    # Extensions that are common among servers.
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    min_tokens: int = 0
    stop_token_ids: list[int] | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    speculation: SpeculationOptions | None = None
    truncate_prompt_tokens: int | None = None
    """Only so many of the prompt's last tokens are used; -1: as many as the context holds."""
    cache_salt: str | None = None
    """Only requests with the same salt share cached prefixes, within what the API key shares."""
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    """vLLM's, with one of ``json``, ``json_object``, ``regex``, ``choice`` and ``grammar``."""
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    json_schema: dict[str, Any] | str | None = None
    """SGLang's, like ``regex`` and ``ebnf``."""
    regex: str | None = None
    ebnf: str | None = None
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
    """A string, token ids, or an array of either; see :func:`cluster.gateway.openai.model_inputs.split_prompts`."""
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
    tools: list[Any] | None = None
    """See :func:`cluster.gateway.openai.tool_use.resolve_tools`."""
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    """Given to the chat template, with ``enable_thinking: false`` for ``none``."""

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """What the chat template gets besides the messages."""
        effort = self.reasoning_effort
        given: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
        if effort == "none":
            given["enable_thinking"] = False
        return {**given, **(self.chat_template_kwargs or {})}


RequestT = TypeVar("RequestT", bound=BaseRequest)

_MAX_EXACT = 2.0**53
"""Larger floats do not stand for one integer only."""

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
    """Parses ``body`` into a request.

    Raises:
        InvalidRequestError: a parameter is unknown, missing or mistyped, or its value is not supported.
    """
    check_known(body, schema.model_fields.keys() | schema.ignored)
    integers = _integer_fields(schema)
    given = {name: _whole(value) if name in integers else value for name, value in body.items() if value is not None}
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


@cache
def _integer_fields(schema: type[BaseRequest]) -> frozenset[str]:
    """The parameters that are an integer or an array of integers."""
    kinds = {name: (field.annotation, *get_args(field.annotation)) for name, field in schema.model_fields.items()}
    return frozenset(name for name, kind in kinds.items() if int in kind or list[int] in kind)


def _whole(value: Any) -> Any:
    """``value`` with whole numbers as integers, which some languages write as 64.0."""
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return int(value) if type(value) is float and value.is_integer() and abs(value) < _MAX_EXACT else value


def _explain(error: ValidationError) -> InvalidRequestError:
    """Describes the first validation error without pydantic's class names."""
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
    """Whether ``value`` is a float that orjson made of an integer beyond 64 bits."""
    return isinstance(value, float) and abs(value) >= 2.0**63
