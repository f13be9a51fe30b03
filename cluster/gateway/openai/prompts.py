"""What the model is given: the ``prompt`` of completions and the ``messages`` of chats, checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from baton.core.errors import InvalidRequestError, UnsupportedParameterError
from cluster.gateway.openai.json_body import json_type, shown
from cluster.gateway.openai.parameters import check_known

_PROMPT_FORMS = "a non-empty string, an array of token ids, or an array of either"
_ROLES = ("system", "developer", "user", "assistant")
_UNSUPPORTED_ROLES = ("tool", "function")
# Fields that clients send back with an assistant's message; they must be empty.
_EMPTY_ONLY = ("refusal", "audio", "function_call", "tool_calls", "annotations")


def split_prompts(prompt: Any) -> list[str | list[int]]:
    """The single prompts of ``prompt``, each a string or token ids.

    Raises:
        InvalidRequestError: it is none of the four forms that OpenAI allows, or empty.
    """
    if isinstance(prompt, str) or _is_token_ids(prompt):
        prompts: list[Any] = [prompt]
    elif isinstance(prompt, list):
        prompts = prompt
        if prompt and type(prompt[0]) is int:
            index = next(index for index, item in enumerate(prompt) if type(item) is not int)
            raise InvalidRequestError(
                f"prompt must be {_PROMPT_FORMS}, but after token ids entry {index} is {json_type(prompt[index])}.",
                param="prompt",
            )
    else:
        raise InvalidRequestError(f"prompt must be {_PROMPT_FORMS}, got {json_type(prompt)}.", param="prompt")
    if not prompts:
        raise InvalidRequestError(f"prompt is empty; it must be {_PROMPT_FORMS}.", param="prompt")
    for index, item in enumerate(prompts):
        if item == "" or item == []:
            raise InvalidRequestError(f"prompt {index} is empty; it must have at least one token.", param="prompt")
        if not isinstance(item, str) and not _is_token_ids(item):
            raise InvalidRequestError(
                f"prompt must be {_PROMPT_FORMS}, but entry {index} is {json_type(item)}.", param="prompt"
            )
    if len({isinstance(item, str) for item in prompts}) > 1:
        raise InvalidRequestError("prompt must not mix strings and token ids in one array.", param="prompt")
    return prompts


def _is_token_ids(value: Any) -> bool:
    # type() and not isinstance(): true is no token id.
    return isinstance(value, list) and bool(value) and set(map(type, value)) == {int}


def check_messages(messages: Sequence[Any]) -> list[dict[str, str]]:
    """The conversation as chat templates want it: plain strings, and ``developer`` called ``system``.

    Raises:
        InvalidRequestError: no messages, or one that is malformed; the message says which.
        UnsupportedParameterError: roles or content parts that need tools, images or sound.
    """
    if not messages:
        raise InvalidRequestError("messages is empty; it must have at least one message.", param="messages")
    return [_check_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _check_message(message: Any, where: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise InvalidRequestError(f"{where} must be an object, got {json_type(message)}.", param="messages")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        if isinstance(role, str) and role in _UNSUPPORTED_ROLES:
            raise UnsupportedParameterError(
                f"{where}.role {role!r} is not supported: there are no tools.", param="messages"
            )
        raise InvalidRequestError(
            f"{where}.role must be one of {', '.join(_ROLES)}, got {shown(role)}.", param="messages"
        )
    known = {"role", "content", "name"} | (set(_EMPTY_ONLY) if role == "assistant" else set())
    check_known(message, known, f"key in {where}:")
    for field in _EMPTY_ONLY:
        if message.get(field):
            raise UnsupportedParameterError(f"{where}.{field} is not supported; leave it out.", param="messages")
    checked = {"role": "system" if role == "developer" else role}
    checked["content"] = _check_content(message.get("content"), f"{where}.content")
    name = message.get("name")
    if name is not None:
        if not isinstance(name, str):
            raise InvalidRequestError(f"{where}.name must be a string, got {json_type(name)}.", param="messages")
        checked["name"] = name
    return checked


def _check_content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise InvalidRequestError(
            f"{where} must be a string or a non-empty array of text parts, got {shown(content)}.", param="messages"
        )
    return "\n".join(_check_part(part, f"{where}[{index}]") for index, part in enumerate(content))


def _check_part(part: Any, where: str) -> str:
    if not isinstance(part, dict):
        raise InvalidRequestError(f"{where} must be an object, got {json_type(part)}.", param="messages")
    if part.get("type") != "text":
        raise UnsupportedParameterError(
            f"{where}.type {shown(part.get('type'))} is not supported; only text parts are.", param="messages"
        )
    # A cache breakpoint is a hint only: the prefix cache finds shared prefixes by itself.
    check_known(part, ("type", "text", "prompt_cache_breakpoint"), f"key in {where}:")
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequestError(f"{where}.text must be a string, got {json_type(text)}.", param="messages")
    return text
