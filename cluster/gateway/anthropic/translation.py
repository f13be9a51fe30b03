"""Requests in Anthropic's form as chats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.gateway.anthropic.input_messages import continues, messages_of
from cluster.gateway.anthropic.schemas import MessagesRequest, PromptRequest
from cluster.gateway.openai.json_body import shown, whole, without_nulls
from cluster.gateway.openai.known_names import check_known
from cluster.gateway.openai.nested import (
    check_neutral,
    checked_choice,
    checked_object,
    checked_string,
    unsupported_type,
    wrong,
)
from cluster.gateway.openai.schemas import ChatCompletionRequest
from cluster.gateway.openai.shared_parameters import chat_of

NAMES = {
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config",
    "Each stop string": "Each of stop_sequences",
    "stop": "stop_sequences",
    "function.name": "name",
    "function.description": "description",
    "function.parameters": "input_schema",
    "function.strict": "strict",
}
"""What errors say of a chat, in the words of this API."""

_EFFORTS = ("low", "medium", "high", "xhigh", "max")
_NEUTRAL_OF_TOOLS: Mapping[str, tuple[Any, ...]] = {
    "allowed_callers": (["direct"], []), "defer_loading": (False,), "input_examples": ([],),
}  # fmt: skip
_TIERS = {"standard_only": "default"}


def to_chat(request: MessagesRequest) -> ChatCompletionRequest:
    """Raises :class:`InvalidRequestError` for what is malformed or, if its name is known, not supported."""
    tier = request.service_tier
    return chat_of(
        request,
        **_prompt(request),
        max_tokens=request.max_tokens,
        stop=request.stop_sequences,
        service_tier=None if tier is None else _TIERS.get(tier, tier),
    )


def to_counted_chat(request: PromptRequest) -> ChatCompletionRequest:
    """Like :func:`to_chat`, for a request whose prompt is only counted."""
    return ChatCompletionRequest.model_validate(without_nulls({"model": request.model, **_prompt(request)}))


def _prompt(request: PromptRequest) -> dict[str, Any]:
    messages = messages_of(request.messages, request.system)
    effort, response_format = _output_config(request.output_config or {})
    choice, is_single = _tool_choice(request.tool_choice)
    return {
        "messages": messages,
        "continue_final_message": continues(messages),
        "tools": [_tool(tool, f"tools[{index}]") for index, tool in enumerate(request.tools or ())],
        "tool_choice": choice,
        "parallel_tool_calls": not is_single,
        "chat_template_kwargs": _template_kwargs(request.thinking),
        "reasoning_effort": effort,
        "response_format": response_format,
    }


def _template_kwargs(thinking: dict[str, Any] | None) -> dict[str, Any] | None:
    if thinking is None:
        return None
    given = checked_object(thinking, "thinking", ("type", "budget_tokens", "display"))
    kind = given.get("type")
    if kind not in ("enabled", "adaptive", "disabled"):
        raise unsupported_type("thinking", kind, ("enabled", "adaptive", "disabled"))
    check_neutral(given, "thinking", {"display": ("summarized",)})
    if kind == "enabled" and type(budget := whole(given.get("budget_tokens"))) is not int:
        raise wrong("thinking.budget_tokens", f"must be an integer, got {shown(budget)}.")
    return {"enable_thinking": kind != "disabled"}


def _output_config(config: dict[str, Any]) -> tuple[str | None, dict[str, Any] | None]:
    """The effort, and the format as that of a chat."""
    given = checked_object(config, "output_config", ("effort", "format", "task_budget"))
    check_neutral(given, "output_config", {"task_budget": ()})
    effort = checked_choice(given["effort"], "output_config.effort", _EFFORTS) if "effort" in given else None
    if "format" not in given:
        return effort, None
    wanted = checked_object(given["format"], "output_config.format", ("type", "schema"))
    if wanted.get("type") != "json_schema":
        raise unsupported_type("output_config.format", wanted.get("type"), ("json_schema",))
    return effort, {"type": "json_schema", "json_schema": {"schema": wanted.get("schema")}}


def _tool(tool: Any, path: str) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind not in (None, "custom"):
        raise unsupported_type(path, kind, ("custom",))
    known = ("type", "name", "description", "input_schema", "strict", "cache_control", "eager_input_streaming")
    given = checked_object(tool, path, (*known, *_NEUTRAL_OF_TOOLS))
    check_neutral(given, path, _NEUTRAL_OF_TOOLS)
    function = {key: given[key] for key in ("name", "description", "strict") if key in given}
    if "input_schema" not in given:
        raise wrong(f"{path}.input_schema", "is missing; it must be a JSON schema.")
    return {"type": "function", "function": {**function, "parameters": given["input_schema"]}}


def _tool_choice(choice: dict[str, Any] | None) -> tuple[Any, bool]:
    """The choice as that of a chat, and whether the answer has one call at most."""
    if choice is None:
        return None, False
    given = checked_object(choice, "tool_choice", ("type", "name", "disable_parallel_tool_use"))
    is_single = given.get("disable_parallel_tool_use", False)
    if not isinstance(is_single, bool):
        raise wrong("tool_choice.disable_parallel_tool_use", f"must be a boolean, got {shown(is_single)}.")
    kind = checked_choice(given.get("type"), "tool_choice.type", ("auto", "any", "tool", "none"))
    if kind != "tool":
        check_known(given, ("type", "disable_parallel_tool_use"), path="tool_choice")
    else:
        name = checked_string(given.get("name"), "tool_choice.name")
        return {"type": "function", "function": {"name": name}}, True
    return {"any": "required"}.get(kind, kind), is_single
