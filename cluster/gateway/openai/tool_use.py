"""The tools of a chat request: which functions the model may call, and which it must."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cluster.gateway.formats.base import CallRule, Function
from cluster.gateway.openai.json_body import check_finite, json_type, shown, without_nulls
from cluster.gateway.openai.known_names import check_known
from cluster.gateway.openai.nested import checked_object, checked_string, object_at, unsupported, wrong
from cluster.gateway.openai.schemas import ChatCompletionRequest

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_FUNCTION_KEYS = ("name", "description", "parameters", "strict")
_NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}}
_CHOICES = 'none, auto, required, {"type": "function", "function": {"name": …}} or {"type": "allowed_tools", …}'


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Attributes:
    listed: the request's tools, for the chat template; empty if none may be called.
    functions: those that may be called.
    is_required: the answer must be a call.
    is_single: the answer has one call at most.
    """

    listed: Sequence[dict[str, Any]] = ()
    functions: Sequence[Function] = ()
    is_required: bool = False
    is_single: bool = False

    def rule(self, *, has_answer: bool = False) -> CallRule | None:
        """What the output must follow; ``None`` if it is free.

        Args:
            has_answer: an answer without a call has a grammar of its own, beside which calls need one, too.
        """
        if self.is_required:
            return CallRule(self.functions, True, self.is_single)
        if any(function.strict for function in self.functions) or (has_answer and self.functions):
            return CallRule(self.functions, False, self.is_single, lambda function: function.strict)
        return None


def resolve_tools(request: ChatCompletionRequest, *, is_allowed: bool = True) -> ToolUse:
    """Reads ``tools``, ``tool_choice`` and ``parallel_tool_calls``.

    Args:
        is_allowed: whether the model may call functions.

    Raises:
        InvalidRequestError: a tool is malformed, or the choice does not fit the tools.
        UnsupportedParameterError: a tool is not a function, or functions may not be called.
    """
    use = _resolve(request)
    if use.functions and not is_allowed:
        raise unsupported(
            "tools", "are not supported, because router.tool_parser is none on this endpoint; leave them out."
        )
    return use


def _resolve(request: ChatCompletionRequest) -> ToolUse:
    tools, choice = request.tools or [], request.tool_choice
    functions = [_check_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    if len({function.name for function in functions}) < len(functions):
        (name, _), *_ = Counter(function.name for function in functions).most_common(1)
        raise wrong("tools", f"has two functions with the name {name!r}.")
    if not functions:
        if choice not in (None, "none", "auto"):
            raise wrong("tool_choice", "asks for a call, but tools is empty.")
        return ToolUse()
    is_single = request.parallel_tool_calls is False
    use = ToolUse([dict(tool) for tool in tools], functions, is_single=is_single)
    if choice in (None, "auto"):
        return use
    if choice == "none":
        return ToolUse()
    if choice == "required":
        return replace(use, is_required=True)
    if isinstance(choice, dict) and choice.get("type") == "function":
        name = _function_name(choice, "tool_choice")
        return replace(use, functions=_select([name], functions), is_required=True, is_single=True)
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        check_known(choice, ("type", "allowed_tools"), path="tool_choice")
        return _allowed(choice.get("allowed_tools"), use)
    raise wrong("tool_choice", f"must be {_CHOICES}, got {shown(choice)}.")


def _allowed(allowed: Any, use: ToolUse) -> ToolUse:
    if not isinstance(allowed, dict) or not isinstance(allowed.get("tools"), list) or not allowed["tools"]:
        raise wrong("tool_choice.allowed_tools", "must have an array of at least one of the tools.")
    check_known(allowed, ("mode", "tools"), path="tool_choice.allowed_tools")
    mode = allowed.get("mode")
    if mode not in ("auto", "required"):
        raise wrong("tool_choice.allowed_tools.mode", f"must be auto or required, got {shown(mode)}.")
    names = [_function_name(tool, f"tool_choice.allowed_tools.tools[{i}]") for i, tool in enumerate(allowed["tools"])]
    return replace(use, functions=_select(names, use.functions), is_required=mode == "required")


def _function_name(value: Any, where: str) -> str:
    given = value if isinstance(value, dict) else {}
    check_known(given, ("type", "function"), path=where)
    function = given.get("function")
    function = function if isinstance(function, dict) else {}
    name = checked_string(function.get("name"), f"{where}.function.name")
    check_known(function, _FUNCTION_KEYS, path=f"{where}.function")
    return name


def _select(names: Sequence[str], functions: Sequence[Function]) -> list[Function]:
    known = {function.name: function for function in functions}
    if unknown := next((name for name in names if name not in known), None):
        raise wrong("tool_choice", f"names the function {unknown[:60]!r}, but tools has {', '.join(known)[:300]}.")
    return [known[name] for name in dict.fromkeys(names)]


def _check_tool(tool: Any, where: str) -> Function:
    tool = object_at(tool, where)
    if tool.get("type") != "function":
        raise unsupported(f"{where}.type", f"{shown(tool.get('type'))} is not supported; only functions are.")
    check_known(tool, ("type", "function", "cache_control"), path=where)
    function = checked_object(tool.get("function"), f"{where}.function", _FUNCTION_KEYS)
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise wrong(f"{where}.function.name", f"must be 1 to 128 of A-Z, a-z, 0-9, _, . and -, got {shown(name)}.")
    for key, kind, expected in (
        ("description", str, "a string"), ("parameters", dict, "an object"), ("strict", bool, "a boolean")
    ):  # fmt: skip
        value = function.get(key)
        if value is not None and not isinstance(value, kind):
            raise wrong(f"{where}.function.{key}", f"must be {expected}, got {json_type(value)}.")
    check_finite(function.get("parameters"), f"{where}.function.parameters")
    parameters = _object_schema(function.get("parameters"), f"{where}.function.parameters")
    return Function(name, parameters, bool(function.get("strict")))


def _object_schema(schema: Mapping[str, Any] | None, where: str) -> Mapping[str, Any]:
    """The schema of a function's arguments, which are an object even if the schema also allows others."""
    if schema is None:
        return _NO_ARGUMENTS
    types = schema.get("type") or "object"
    if "object" not in (types if isinstance(types, list) else [types]):
        raise wrong(
            where,
            f'must be a schema of an object, such as {{"type": "object", "properties": {{…}}}}, got the type '
            f"{shown(types)}.",
        )
    return {**without_nulls(schema), "type": "object"}
