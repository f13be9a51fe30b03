"""Messages in Anthropic's form as messages of a chat."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from cluster.gateway.openai.json_body import shown
from cluster.gateway.openai.nested import (
    check_neutral,
    check_size,
    checked_choice,
    checked_list,
    checked_object,
    checked_string,
    checked_word,
    unsupported,
    unsupported_type,
    wrong,
)

Message = dict[str, Any]

_ROLES = ("user", "assistant", "system")
_KEYS: Mapping[str, tuple[str, ...]] = {
    "text": ("text", "citations"),
    "thinking": ("thinking", "signature"),
    "tool_use": ("id", "name", "input", "caller", "toolset_name"),
    "tool_result": ("tool_use_id", "content", "is_error", "toolset_name"),
}
"""The blocks that are supported, and their keys."""
_BLOCKS: Mapping[str, tuple[str, ...]] = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "tool_use"),
    "system": ("text",),
}
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {"citations": ([],), "caller": ({"type": "direct"},), "toolset_name": ()}
_ERROR = "Error: "


def messages_of(messages: Sequence[Any], system: Any) -> list[Message]:
    """Messages of a chat.

    Raises:
        InvalidRequestError: a message is malformed; the text names it.
        UnsupportedParameterError: a block that is no text, thinking, tool use or tool result.
    """
    found: list[Message] = []
    check_size(system, "system")
    check_size(messages, "messages")
    if system is not None and (text := _text(system, "system")):
        found.append({"role": "system", "content": text})
    if not messages:
        raise wrong("messages", "is empty; it must have at least one message.")
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        given = checked_object(message, path, ("role", "content", "cache_control"))
        role = checked_choice(given.get("role"), f"{path}.role", _ROLES)
        content = given.get("content", "")
        if isinstance(content, str):
            found.append({"role": role, "content": content})
        elif role == "assistant":
            found.append(_assistant(_blocks(content, f"{path}.content", _BLOCKS[role])))
        else:
            found += _with_results(role, _blocks(content, f"{path}.content", _BLOCKS[role]))
    return found


def continues(messages: Sequence[Message]) -> bool:
    """Whether the answer continues the last message, which is then text of the assistant.

    Raises:
        InvalidRequestError: it has tool uses, whose results are missing.
    """
    if not messages or messages[-1]["role"] != "assistant":
        return False
    if messages[-1].get("tool_calls"):
        raise wrong("messages", "ends with a tool_use; add a message of the user with its tool_result.")
    return True


def _blocks(content: Any, path: str, kinds: Collection[str]) -> list[tuple[str, dict[str, Any]]]:
    """The blocks of a message with their paths."""
    found = []
    for index, block in enumerate(checked_list(content, path, "a string or an array of blocks")):
        where = f"{path}[{index}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "redacted_thinking":
            raise unsupported(
                where, "has thinking that is encrypted, which only its author can read; leave the block out."
            )
        if isinstance(block, dict) and kind not in kinds:
            raise unsupported_type(where, kind, kinds)
        known = checked_object(block, where, ("type", "cache_control", *_KEYS.get(str(kind), ())))
        check_neutral(known, where, _NEUTRAL)
        found.append((where, known))
    return found


def _text(content: Any, path: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(
        checked_string(block.get("text"), f"{where}.text") for where, block in _blocks(content, path, ("text",))
    )


def _assistant(blocks: Sequence[tuple[str, dict[str, Any]]]) -> Message:
    message: Message = {"role": "assistant", "content": ""}
    texts, thoughts, calls = [], [], []
    for path, block in blocks:
        if block["type"] == "text":
            texts.append(checked_string(block.get("text"), f"{path}.text"))
        elif block["type"] == "thinking":
            thoughts.append(checked_string(block.get("thinking"), f"{path}.thinking"))
        else:
            calls.append(_call(block, path))
    message["content"] = "\n".join(texts)
    if thoughts:
        message["reasoning_content"] = "\n\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: Mapping[str, Any], path: str) -> dict[str, Any]:
    arguments = block.get("input", {})
    if not isinstance(arguments, dict):
        raise wrong(f"{path}.input", f"must be an object, got {shown(arguments)}.")
    function = {
        "name": checked_word(block.get("name"), f"{path}.name"),
        "arguments": json.dumps(arguments, ensure_ascii=False),
    }
    return {"id": checked_word(block.get("id"), f"{path}.id"), "type": "function", "function": function}


def _with_results(role: str, blocks: Sequence[tuple[str, dict[str, Any]]]) -> Iterator[Message]:
    """Text and tool results in their order. Neighbouring texts are one message."""
    texts: list[str] = []
    for path, block in blocks:
        if block["type"] == "text":
            texts.append(checked_string(block.get("text"), f"{path}.text"))
            continue
        if texts:
            yield {"role": role, "content": "\n".join(texts)}
            texts = []
        content = _text(block.get("content", ""), f"{path}.content")
        is_error = block.get("is_error", False)
        if not isinstance(is_error, bool):
            raise wrong(f"{path}.is_error", f"must be a boolean, got {shown(is_error)}.")
        content = f"{_ERROR}{content}" if is_error and not content.startswith(_ERROR) else content
        yield {
            "role": "tool",
            "tool_call_id": checked_word(block.get("tool_use_id"), f"{path}.tool_use_id"),
            "content": content,
        }
    if texts or not blocks:
        yield {"role": role, "content": "\n".join(texts)}
