"""Calls and tool results in the messages of a request."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.gateway.openai.json_body import json_type, shown
from cluster.gateway.openai.known_names import check_known
from cluster.gateway.openai.nested import checked_object, object_at, unsupported, wrong
from cluster.gateway.openai.schemas import IGNORED_KEYS


def check_tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """The calls of an assistant's message, with their arguments as JSON text.

    Raises:
        InvalidRequestError: a call is malformed.
        UnsupportedParameterError: a call is not one of a function.
    """
    if not isinstance(calls, list):
        raise wrong(where, f"must be an array, got {json_type(calls)}.")
    return [_check_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def _check_call(call: Any, where: str) -> dict[str, Any]:
    call = object_at(call, where)
    if call.get("type") not in (None, "function"):
        raise unsupported(f"{where}.type", f"{shown(call['type'])} is not supported; only functions are.")
    check_known(call, ("id", "type", "function", "index", "cache_control", *IGNORED_KEYS), path=where)
    function = checked_object(call.get("function"), f"{where}.function", ("name", "arguments", *IGNORED_KEYS))
    arguments = function.get("arguments")
    if isinstance(arguments, dict):  # as some clients keep them
        arguments = json.dumps(arguments, ensure_ascii=False)
    for value, key in ((call.get("id"), "id"), (function.get("name"), "function.name")):
        if not isinstance(value, str) or not value:
            raise wrong(f"{where}.{key}", f"must be a string, got {shown(value)}.")
    if arguments is not None and not isinstance(arguments, str):
        raise wrong(f"{where}.function.arguments", f"must be a string of JSON, got {json_type(arguments)}.")
    return {"id": call["id"], "type": "function", "function": {"name": function["name"], "arguments": arguments or ""}}


def check_call_id(message: Mapping[str, Any], where: str) -> str:
    """The id of the call that a message of the role ``tool`` answers."""
    call_id = message.get("tool_call_id")
    if not isinstance(call_id, str) or not call_id:
        raise wrong(f"{where}.tool_call_id", f"must be the id of a call, got {shown(call_id)}.")
    return call_id


def name_results(messages: Sequence[dict[str, Any]]) -> None:
    """Adds to each tool result the name of its function, which some chat templates need."""
    names: dict[str, str] = {}
    for message in messages:
        names.update({call["id"]: call["function"]["name"] for call in message.get("tool_calls") or ()})
        if message["role"] == "tool" and message["tool_call_id"] in names:
            message.setdefault("name", names[message["tool_call_id"]])


def num_chars(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> int:
    """Characters of the texts that a chat template writes."""
    calls = (call["function"]["arguments"] for message in messages for call in message.get("tool_calls") or ())
    contents = (message["content"] for message in messages)
    return sum(map(len, contents)) + sum(map(len, calls)) + (len(json.dumps(tools)) if tools else 0)
