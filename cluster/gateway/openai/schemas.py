"""Request schemas: the honoured parameters of each endpoint with strict types, and the handling of all others.

A parameter is *honoured* (a field of a request schema), *accepted* (it has no effect, so any value of the right type is
allowed), or *refused by name* unless its value is neutral: :mod:`cluster.gateway.openai.parameter_table` says which.
Any other parameter is unknown and gets a 400, unless the configuration ignores it.
:mod:`cluster.gateway.openai.plan` checks values against the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, WithJsonSchema

from baton.core.errors import InvalidRequestError, UnsupportedParameterError
from baton.core.roles import SpeculationMethod
from cluster.gateway.openai.json_body import json_type, shown, whole, without_nulls
from cluster.gateway.openai.known_names import check_known
from cluster.gateway.openai.parameter_table import endpoints_of, parameters_of
from cluster.gateway.openai.parameters import CHAT, COMPLETIONS, Parameter


def without_unknown(schema: type[RequestSchema], body: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Divides a request into the parameters that some endpoint knows, and the names of the others."""
    known = {name: value for name, value in body.items() if name in schema.parameters or endpoints_of(name)}
    return known, [name for name in body if name not in known]


def _check_names(schema: type[RequestSchema], names: Iterable[str]) -> None:
    """Raises :class:`InvalidRequestError` for the first parameter that the endpoint does not know."""
    for name in names:
        own, others = schema.own_names.get(name), endpoints_of(name)
        if name not in schema.parameters and (own or others):
            problem = f"a parameter of {' and '.join(others)} only" if others else f"no parameter of {schema.endpoint}"
            raise UnsupportedParameterError(
                f"{name} is {problem}. {f'Send {own}' if own else 'Leave it out'}.", param=name
            )
    check_known(names, schema.parameters, listed=schema.model_fields)


def _check_rules(schema: type[RequestSchema], values: Mapping[str, Any]) -> None:
    """Checks sizes, and the parameters that are not passed to the engine.

    Raises:
        UnsupportedParameterError: a value asks for something that is not supported.
        InvalidRequestError: a value has too many entries, or an accepted parameter has the wrong type.
    """
    for name, value in values.items():
        parameter = schema.parameters[name]
        limit, rule = parameter.max_items, parameter.rule
        if limit is not None and isinstance(value, (list, dict)) and len(value) > limit:
            raise InvalidRequestError(f"{name} has {len(value)} entries; at most {limit} are allowed.", param=name)
        if rule is None or rule.allows(value):
            continue
        if not parameter.has_effect:
            raise InvalidRequestError(f"{name} must be {rule.describe()}, got {json_type(value)}.", param=name)
        raise UnsupportedParameterError(
            f"{name} is not supported with the value {shown(value)}; it must be {rule.describe()}.", param=name
        )


IGNORED_KEYS = (
    "annotations", "id", "parsed", "parsed_arguments", "provider_specific_fields", "reasoning_details",
    "thinking_blocks",
)  # fmt: skip
"""Keys of messages, calls and functions that clients send back. The model never sees them."""
_IGNORED: dict[str, Any] = {key: {} for key in IGNORED_KEYS}
_NULL = {"type": "null"}
_PARTS = [
    {"type": "object", "properties": {"type": {"const": kind}, kind: {"type": "string"}}, "required": ["type", kind]}
    for kind in ("text", "refusal")
]
_CONTENT = {"anyOf": [{"type": ["string", "null"]}, {"type": "array", "items": {"anyOf": _PARTS}}]}
_WORD = {"type": "string", "minLength": 1}
_MAYBE_TEXT = {"type": ["string", "null"]}
_CALL = {
    "type": "object",
    "properties": {
        **_IGNORED,
        "id": _WORD,
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {**_IGNORED, "name": _WORD, "arguments": {"type": "string"}},
            "required": ["name", "arguments"],
            "additionalProperties": _NULL,
        },
    },
    "required": ["id", "function"],
    "additionalProperties": _NULL,
}


def _message(roles: list[str], required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    shared = {**_IGNORED, "role": {"enum": roles}, "content": _CONTENT, "name": _MAYBE_TEXT, "cache_control": {}}
    return {
        "type": "object",
        "properties": {**shared, **properties},
        "required": ["role", *required],
        "additionalProperties": _NULL,
    }


MESSAGES = {
    "type": "array",
    "minItems": 1,
    "items": {
        "anyOf": [
            _message(["system", "developer", "user"]),
            _message(
                ["assistant"],
                refusal=_MAYBE_TEXT,
                reasoning_content=_MAYBE_TEXT,
                reasoning=_MAYBE_TEXT,
                tool_calls={"type": ["array", "null"], "items": _CALL},
            ),
            _message(["tool"], ("tool_call_id",), tool_call_id=_WORD),
        ]
    },
}
_TOKEN_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_TEXT = {"type": "string", "minLength": 1}
_PROMPT = {
    "anyOf": [_TEXT, _TOKEN_IDS, *({"type": "array", "minItems": 1, "items": item} for item in (_TEXT, _TOKEN_IDS))]
}


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    include_usage: bool = False
    continuous_usage_stats: bool = False
    """vLLM's extension: every chunk carries the usage so far."""
    include_obfuscation: bool = False
    """Only false is supported."""


class SpeculationOptions(BaseModel):
    """baton's extension: how this request speculates."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    method: SpeculationMethod | None = None
    """``None``: as the cluster is configured."""
    trace: bool = False
    """The answer and its timeline tell what was drafted and accepted, round by round."""


class RequestSchema(BaseModel):
    """The honoured parameters of an endpoint. Null means absent, as with OpenAI."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)
    endpoint: ClassVar[str]
    parameters: ClassVar[Mapping[str, Parameter]]
    """All parameters that the endpoint knows, by name."""
    own_names: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """What to send instead of parameters of other endpoints."""


class CommonRequest(RequestSchema):
    """The parameters of every endpoint that generates tokens, with extensions that are common among servers."""

    model: str | None = None
    """Absent: the model that the endpoint serves."""
    temperature: float = 1.0
    top_p: float = 1.0
    stream: bool = False
    service_tier: str | None = None
    """Names the SLO class; see :meth:`baton.core.slo.SloClasses.choose`."""
    seed: int | None = None
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


class BaseRequest(CommonRequest):
    """The parameters that chats and completions share."""

    max_tokens: int | None = None
    n: int = 1
    stop: str | list[str] | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] | None = None

    # Extensions that are common among servers.
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
    prompt_logprobs: int | None = None
    """vLLM's: the log probabilities of the prompt's tokens, each with so many of the most likely tokens."""
    return_token_ids: bool = False
    """Every choice carries ``token_ids``, the exact tokens behind its text."""

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class CompletionRequest(BaseRequest):
    endpoint: ClassVar[str] = COMPLETIONS
    parameters: ClassVar[Mapping[str, Parameter]] = parameters_of(COMPLETIONS)
    own_names: ClassVar[Mapping[str, str]] = {
        "messages": "prompt",
        "input": "prompt",
        "max_completion_tokens": "max_tokens",
        "max_output_tokens": "max_tokens",
        "stop_sequences": "stop",
    }

    prompt: Annotated[Any, WithJsonSchema(_PROMPT)]
    """A string, token ids, or an array of either; see :func:`cluster.gateway.openai.model_inputs.split_prompts`."""
    logprobs: int | None = None
    echo: bool = False
    best_of: int | None = None
    add_special_tokens: bool = True


class ChatCompletionRequest(BaseRequest):
    endpoint: ClassVar[str] = CHAT
    parameters: ClassVar[Mapping[str, Parameter]] = parameters_of(CHAT)
    own_names: ClassVar[Mapping[str, str]] = {
        "prompt": "messages",
        "input": "messages",
        "system": "a message with the role system",
        "instructions": "a message with the role system",
        "max_output_tokens": "max_tokens",
        "stop_sequences": "stop",
        "text": "response_format",
        "output_config": "response_format or reasoning_effort",
        "thinking": "reasoning_effort",
    }

    messages: Annotated[list[Any], WithJsonSchema(MESSAGES)]
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
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """Given to the chat template, with ``enable_thinking: false`` for ``none``."""

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """What the chat template gets besides the messages."""
        effort = self.reasoning_effort
        given: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
        if effort == "none":
            given["enable_thinking"] = False
        return {**given, **(self.chat_template_kwargs or {})}


RequestT = TypeVar("RequestT", bound=RequestSchema)

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
    given = without_nulls(body)
    _check_names(schema, given)
    _check_rules(schema, given)
    integers = _integer_fields(schema)
    given = {name: whole(value) if name in integers else value for name, value in given.items()}
    for name, value in given.items():
        if type(value) is int and not -(2**63) <= value < 2**63:
            raise InvalidRequestError(
                f"{name} must be an integer between -2^63 and 2^63 - 1, got {shown(value)}.", param=name
            )
    for name, nested in (("stream_options", StreamOptions), ("speculation", SpeculationOptions)):
        if isinstance(options := given.get(name), dict):
            given[name] = without_nulls(options)
            check_known(given[name], nested.model_fields, path=name)
    if isinstance(bias := given.get("logit_bias"), dict):
        given["logit_bias"] = without_nulls(bias)
    try:
        return schema.model_validate({name: value for name, value in given.items() if name in schema.model_fields})
    except ValidationError as error:
        raise explain(error) from error


@cache
def _integer_fields(schema: type[RequestSchema]) -> frozenset[str]:
    """The parameters that are an integer or an array of integers."""
    kinds = {name: (field.annotation, *get_args(field.annotation)) for name, field in schema.model_fields.items()}
    return frozenset(name for name, kind in kinds.items() if int in kind or list[int] in kind)


_UNION_MEMBER = re.compile(r"(?:dict|list)\[.*\]")
"""What pydantic puts into a path for the type of a union, as in ``guided_json.dict[str,any]``."""


def explain(error: ValidationError) -> InvalidRequestError:
    """Describes the first validation error without pydantic's class names."""
    details = error.errors(include_url=False, include_context=False)
    first = details[0]
    name = str(first["loc"][0])
    parts = [name, *(part for part in first["loc"][1:] if not _UNION_MEMBER.fullmatch(str(part)))]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)[1:101]
    if first["type"] == "missing":
        return InvalidRequestError(f"The required parameter {path} is missing.", param=path)
    if name == "stop":
        return InvalidRequestError("stop must be a string or an array of strings.", param=name)
    if first["type"] == "literal_error":
        choices = first["msg"].removeprefix("Input should be ")
        return InvalidRequestError(f"{path} must be {choices}, got {shown(first['input'])}.", param=path)
    expected = _EXPECTED_TYPES.get(first["type"])
    if expected is None:
        return InvalidRequestError(f"{path} is not valid: {first['msg']}.", param=path)
    value = first["input"]
    return InvalidRequestError(f"{path} must be {expected}, got {_shown_with_type(value)}.", param=path)


def _shown_with_type(value: Any) -> str:
    kind, text = json_type(value), shown(value)
    return kind if kind == text else f"{kind} ({text})"
