"""Inputs of the model: checked prompts and messages, and sampling parameters."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from baton.core.errors import ContextLengthError, InvalidRequestError
from baton.core.request import MAX_LOGPROBS, SEED_LIMIT, SamplingParams
from cluster.gateway.openai.json_body import json_type, shown, whole
from cluster.gateway.openai.known_names import check_known
from cluster.gateway.openai.nested import object_at, unsupported, wrong
from cluster.gateway.openai.schemas import IGNORED_KEYS, BaseRequest
from cluster.gateway.openai.tool_messages import check_call_id, check_tool_calls, name_results
from cluster.requests.generation import ModelCard

_PROMPT_FORMS = "a non-empty string, an array of token ids, or an array of either"
MAX_PROMPTS = 1024
_ROLES = ("system", "developer", "user", "assistant", "tool")
_KEYS = frozenset({"role", "content", "name", "cache_control", *IGNORED_KEYS})
_ASSISTANTS_KEYS = _KEYS | {
    "refusal", "reasoning_content", "reasoning", "audio", "function_call", "tool_calls",
}  # fmt: skip
_TOOLS_KEYS = _KEYS | {"tool_call_id"}
_EMPTY_ONLY = ("audio", "function_call")


def split_prompts(prompt: Any, max_prompts: int = MAX_PROMPTS) -> list[str | list[int]]:
    """Splits ``prompt`` into single prompts, each a string or token ids.

    Raises:
        InvalidRequestError: it is none of the four forms that OpenAI allows, empty, or has too many prompts.
    """
    prompt = whole(prompt)
    if isinstance(prompt, str) or _is_token_ids(prompt):
        prompts: list[Any] = [prompt]
    elif isinstance(prompt, list):
        prompts = prompt
        if prompt and type(prompt[0]) is int:
            index = next(index for index, item in enumerate(prompt) if type(item) is not int)
            raise wrong(
                "prompt", f"must be {_PROMPT_FORMS}, but after token ids entry {index} is {json_type(prompt[index])}."
            )
    else:
        raise wrong("prompt", f"must be {_PROMPT_FORMS}, got {json_type(prompt)}.")
    check_num_prompts(prompts, max_prompts)
    if not prompts:
        raise wrong("prompt", f"is empty; it must be {_PROMPT_FORMS}.")
    for index, item in enumerate(prompts):
        if item == "" or item == []:
            raise wrong("prompt", f"{index} is empty; it must have at least one token.")
        if not isinstance(item, str) and not _is_token_ids(item):
            raise wrong("prompt", f"must be {_PROMPT_FORMS}, but entry {index} is {json_type(item)}.")
    if len({isinstance(item, str) for item in prompts}) > 1:
        raise wrong("prompt", "must not mix strings and token ids in one array.")
    return prompts


def check_num_prompts(prompt: Any, max_prompts: int) -> None:
    """Raises :class:`InvalidRequestError` for a list of more prompts; a list of token ids is one."""
    if isinstance(prompt, list) and len(prompt) > max_prompts and type(prompt[0]) is not int:
        raise wrong("prompt", f"has {len(prompt)} prompts; at most {max_prompts} are allowed.")


def _is_token_ids(value: Any) -> bool:
    # type() and not isinstance(), since a bool is an int.
    return isinstance(value, list) and bool(value) and set(map(type, value)) == {int}


MAX_MESSAGES = 8192
"""Highest number of messages and content parts of a chat, whatever the context holds: each costs time."""


def count_messages(messages: Sequence[Any], max_messages: int = MAX_MESSAGES) -> int:
    """The number of messages and content parts together.

    Raises:
        InvalidRequestError: there are more than ``max_messages``, or none.
    """
    if not messages:
        raise wrong("messages", "is empty; it must have at least one message.")
    count = len(messages)
    if count <= max_messages:  # otherwise, looking at each takes long
        contents = (message.get("content") for message in messages if isinstance(message, dict))
        count += sum(len(content) for content in contents if isinstance(content, list))
    if count > max_messages:
        raise wrong("messages", f"has {count} messages and content parts; at most {max_messages} are allowed.")
    return count


def check_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """The conversation with contents as plain strings, arguments as JSON text, and ``developer`` renamed ``system``.

    Raises:
        InvalidRequestError: a message is malformed; the error text names it.
        UnsupportedParameterError: roles or content parts that need images, sound, or calls of anything but functions.
    """
    checked = [_check_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    name_results(checked)
    return checked


def _check_message(message: Any, where: str) -> dict[str, Any]:
    message = object_at(message, where)
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        if role == "function":
            raise unsupported(f"{where}.role", "'function' is not supported; use the role 'tool'.")
        raise wrong(f"{where}.role", f"must be one of {', '.join(_ROLES)}, got {shown(role)}.")
    if message.get("tool_calls") == []:
        del message["tool_calls"]
    check_known(message, {"assistant": _ASSISTANTS_KEYS, "tool": _TOOLS_KEYS}.get(role, _KEYS), path=where)
    for field in _EMPTY_ONLY:
        if message.get(field):
            raise unsupported(f"{where}.{field}", "is not supported; leave it out.")
    checked: dict[str, Any] = {"role": "system" if role == "developer" else role}
    refusal = _check_string(message, "refusal", where)
    checked["content"] = _check_content(message.get("content"), f"{where}.content") or refusal
    if name := _check_string(message, "name", where):
        checked["name"] = name
    reasonings = [_check_string(message, key, where) for key in ("reasoning_content", "reasoning")]
    if reasoning := next(filter(None, reasonings), ""):
        checked["reasoning_content"] = reasoning  # templates of reasoning models know it, others leave it out
    if message.get("tool_calls"):
        checked["tool_calls"] = check_tool_calls(message["tool_calls"], f"{where}.tool_calls")
    if role == "tool":
        checked["tool_call_id"] = check_call_id(message, where)
    return checked


def _check_string(message: Mapping[str, Any], key: str, where: str) -> str:
    """The string under ``key``; empty if there is none."""
    value = message.get(key)
    if value is not None and not isinstance(value, str):
        raise wrong(f"{where}.{key}", f"must be a string, got {json_type(value)}.")
    return value or ""


def _check_content(content: Any, where: str) -> str:
    if content is None or content == []:  # such as an assistant's turn that only called tools
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong(where, f"must be a string or an array of text parts, got {shown(content)}.")
    return "\n".join(_check_part(part, f"{where}[{index}]") for index, part in enumerate(content))


def _check_part(part: Any, where: str) -> str:
    part = object_at(part, where)
    kind = part.get("type")
    if kind not in ("text", "refusal"):
        raise unsupported(f"{where}.type", f"{shown(kind)} is not supported; only text parts are.")
    # Hints about the cache have no effect: the prefix cache finds shared prefixes by itself.
    check_known(part, ("type", kind, "prompt_cache_breakpoint", "cache_control"), path=where)
    text = part.get(kind)
    if not isinstance(text, str):
        raise wrong(f"{where}.{kind}", f"must be a string, got {json_type(text)}.")
    return text


_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,11}")


def build_sampling_params(
    request: BaseRequest,
    card: ModelCard,
    max_tokens: int,
    num_logprobs: int | None,
    grammar: str = "",
    echoed_top: int | None = None,
) -> SamplingParams:
    """Sampling parameters of choice 0.

    Args:
        grammar: see :attr:`SamplingParams.grammar`.
        echoed_top: how many of the most likely tokens are echoed with each token of the prompt; ``None``: only
            ``prompt_logprobs`` of the request counts.

    Raises:
        InvalidRequestError: a value is out of its range, or a token id is not in the model's vocabulary.
    """
    if num_logprobs is not None and not 0 <= num_logprobs <= MAX_LOGPROBS:
        param = "top_logprobs" if "top_logprobs" in type(request).model_fields else "logprobs"
        raise wrong(param, f"must be between 0 and {MAX_LOGPROBS}, got {shown(num_logprobs)}.")
    wanted = [count for count in (request.prompt_logprobs, echoed_top) if count is not None]
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=request.temperature,
        # A limit above the vocabulary's size has no effect and may be too large for the wire format.
        top_k=0 if request.top_k >= card.vocab_size else request.top_k,
        top_p=request.top_p,
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        logit_bias=_parse_logit_bias(request.logit_bias),
        stop_token_ids=tuple(dict.fromkeys(request.stop_token_ids or ())),
        ignore_eos=request.ignore_eos,
        min_tokens=request.min_tokens,
        logprobs=num_logprobs,
        prompt_logprobs=max(wanted, default=None),
        seed=resolve_seed(request.seed),
        grammar=grammar,
    )
    params.check_token_ids(card.vocab_size)
    return params


def resolve_max_tokens(
    num_prompt_tokens: int,
    requested: int | None,
    default: int | None,
    card: ModelCard,
    params: tuple[str, str],
    *,
    clips: bool = False,
) -> int:
    """The number of tokens that may be generated: ``requested``, else ``default``, else the room left in the context.

    Args:
        params: the request's names of the prompt and of the bound, for error messages.
        clips: reduce ``requested`` to the room that is left.

    Raises:
        InvalidRequestError: the bound is not positive, or the prompt has no tokens.
        ContextLengthError: prompt and output together do not fit into the model's context.
    """
    prompt_param, bound_param = params
    if num_prompt_tokens == 0:
        raise wrong(prompt_param, "has no tokens; it must have at least one.")
    if requested is not None and requested < 1:
        raise wrong(bound_param, f"must be at least 1, got {shown(requested)}.")
    room = card.max_model_len - num_prompt_tokens
    if room < 1:
        raise ContextLengthError(
            f"This model's context is {card.max_model_len} tokens, prompt and output together, but {prompt_param} "
            f"has {num_prompt_tokens} tokens. Shorten it.",
            param=prompt_param,
        )
    if requested is None:
        return room if default is None else min(default, room)
    if requested > room and not clips:
        raise ContextLengthError(
            f"This model's context is {card.max_model_len} tokens, prompt and output together, but {prompt_param} has "
            f"{num_prompt_tokens} tokens and {bound_param} asks for {shown(requested)} more. Shorten the prompt or "
            f"ask for at most {room}.",
            param=bound_param,
        )
    return min(requested, room)


def truncated(token_ids: list[int], limit: int | None, num_answer_tokens: int | None, card: ModelCard) -> list[int]:
    """The last tokens of a prompt.

    Args:
        limit: ``truncate_prompt_tokens`` of the request. -1 leaves room for the answer.
        num_answer_tokens: how many tokens the request asks for; ``None`` means as many as there is room for.

    Raises:
        InvalidRequestError: the limit is neither positive nor -1.
    """
    if limit is None:
        return token_ids
    if limit < 1 and limit != -1:
        raise wrong(
            "truncate_prompt_tokens", f"must be at least 1, or -1 for as many as the context holds, got {shown(limit)}."
        )
    room = card.max_model_len - min(num_answer_tokens or 1, card.max_model_len - 1)
    return token_ids[-(limit if limit > 0 else room) :]


def resolve_seed(seed: int | None) -> int:
    """The engine's seed: random if ``seed`` is ``None``, else ``seed`` modulo 2^63.

    Raises:
        InvalidRequestError: the seed does not fit into a signed 64-bit integer.
    """
    if seed is None:
        return secrets.randbelow(SEED_LIMIT)
    if not -SEED_LIMIT <= seed < SEED_LIMIT:
        raise wrong("seed", f"must be between -2^63 and 2^63 - 1, got {shown(seed)}.")
    return seed % SEED_LIMIT


def choice_seed(seed: int, choice: int) -> int:
    """The seed of one of ``n`` choices: choice 0 uses the request's seed, the others one derived from it."""
    if choice == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % SEED_LIMIT


def _parse_logit_bias(logit_bias: dict[str, float] | None) -> tuple[tuple[int, float], ...]:
    for key in logit_bias or ():
        if not _TOKEN_ID.fullmatch(key):
            raise InvalidRequestError(
                f"The keys of logit_bias must be decimal token ids, got {shown(key)}.", param="logit_bias"
            )
    return tuple((int(key), float(bias)) for key, bias in (logit_bias or {}).items())
