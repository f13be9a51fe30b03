"""A request of ``/v1/responses`` as a chat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.core.errors import InvalidRequestError
from cluster.gateway.openai.json_body import shown
from cluster.gateway.openai.nested import (
    check_neutral,
    check_size,
    checked_choice,
    checked_list,
    checked_object,
    checked_string,
    unsupported,
    unsupported_type,
    wrong,
)
from cluster.gateway.openai.schemas import ChatCompletionRequest
from cluster.gateway.openai.shared_parameters import chat_of
from cluster.gateway.responses.input_items import messages_of
from cluster.gateway.responses.schemas import ResponsesRequest

NAMES = {
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "tool_choice.allowed_tools": "tool_choice",
    "reasoning_effort": "reasoning",
    "max_completion_tokens": "max_output_tokens",
    "these messages": "this input",
    "messages": "input",
    "function.name": "name",
    "function.description": "description",
    "function.parameters": "parameters",
    "function.strict": "strict",
}
"""What errors say of a chat, in the words of this API."""

_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = (
    "file_search_call.results", "web_search_call.results", "web_search_call.action.sources",
    "message.input_image.image_url", "computer_call_output.output.image_url", "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
)  # fmt: skip
_NEUTRAL_OF_TOOLS: Mapping[str, tuple[Any, ...]] = {
    "async": (False,), "defer_loading": (False,), "allowed_callers": (["direct"], []), "output_schema": (),
}  # fmt: skip
_SUMMARY_KEYS = ("summary", "generate_summary")
_NEUTRAL_OF_REASONING: Mapping[str, tuple[Any, ...]] = {"context": ("auto",), "mode": ("standard",)}
_CHOICES = 'none, auto, required, {"type": "function", "name": …} or {"type": "allowed_tools", …}'


def to_chat(request: ResponsesRequest) -> ChatCompletionRequest:
    """Raises :class:`InvalidRequestError` for what is malformed or, if its name is known, not supported."""
    _check_include(request.include or [])
    return chat_of(
        request,
        messages=messages_of(request.input, request.instructions),
        max_completion_tokens=request.max_output_tokens,
        reasoning_effort=_effort(request.reasoning or {}),
        response_format=_response_format(request.text or {}),
        tools=[_tool(tool, f"tools[{index}]") for index, tool in enumerate(request.tools or ())],
        tool_choice=_tool_choice(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls,
        chat_template_kwargs=request.chat_template_kwargs,
    )


def _check_include(include: list[Any]) -> None:
    for value in include:
        if value == _LOGPROBS:
            raise unsupported("include", f"does not support {_LOGPROBS}; send the request to /v1/chat/completions.")
        checked_choice(value, "include", _INCLUDABLE)


def _effort(reasoning: dict[str, Any]) -> str | None:
    given = checked_object(reasoning, "reasoning", ("effort", *_SUMMARY_KEYS, *_NEUTRAL_OF_REASONING))
    check_neutral(given, "reasoning", _NEUTRAL_OF_REASONING)
    for key in _SUMMARY_KEYS:
        if key in given:
            checked_choice(given[key], f"reasoning.{key}", ("auto", "concise", "detailed"))
    return checked_choice(given["effort"], "reasoning.effort", _EFFORTS) if "effort" in given else None


def _response_format(text: dict[str, Any]) -> dict[str, Any] | None:
    given = checked_object(text, "text", ("format", "verbosity"))
    check_neutral(given, "text", {"verbosity": ("medium",)})
    if "format" not in given:
        return None
    wanted = checked_object(given["format"], "text.format", ("type", "name", "description", "schema", "strict"))
    kind = wanted.pop("type", None)
    if kind not in ("text", "json_object", "json_schema"):
        raise unsupported_type("text.format", kind, ("text", "json_object", "json_schema"))
    if kind == "json_schema":
        return {"type": kind, "json_schema": wanted}
    if kind == "text" and wanted:
        raise InvalidRequestError(
            f"text.format.{next(iter(wanted))} is for the type 'json_schema', but text.format.type is 'text'.",
            param="text.format",
        )
    return {"type": kind, **wanted}


def _tool(tool: Any, path: str) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if isinstance(tool, dict) and kind != "function":
        raise unsupported_type(path, kind, ("function",))
    given = checked_object(tool, path, ("type", "name", "description", "parameters", "strict", *_NEUTRAL_OF_TOOLS))
    check_neutral(given, path, _NEUTRAL_OF_TOOLS)
    function = {key: value for key, value in given.items() if key != "type" and key not in _NEUTRAL_OF_TOOLS}
    return {"type": "function", "function": function}


def _tool_choice(choice: Any) -> Any:
    if choice in (None, "none", "auto", "required"):
        return choice
    if not isinstance(choice, dict):
        raise wrong("tool_choice", f"must be {_CHOICES}, got {shown(choice)}.")
    kind = choice.get("type")
    if kind == "function":
        return {"type": "function", "function": {"name": _name(choice, "tool_choice")}}
    if kind == "allowed_tools":
        given = checked_object(choice, "tool_choice", ("type", "mode", "tools"))
        tools = checked_list(given.get("tools"), "tool_choice.tools")
        check_size(tools, "tool_choice.tools")
        names = [_name(tool, f"tool_choice.tools[{index}]") for index, tool in enumerate(tools)]
        allowed = [{"type": "function", "function": {"name": name}} for name in names]
        return {"type": "allowed_tools", "allowed_tools": {"mode": given.get("mode"), "tools": allowed}}
    raise unsupported_type("tool_choice", kind, ("function", "allowed_tools"))


def _name(value: Any, path: str) -> str:
    given = checked_object(value, path, ("type", "name"))
    if given.get("type") != "function":
        raise unsupported_type(path, given.get("type"), ("function",))
    return checked_string(given.get("name"), f"{path}.name")
