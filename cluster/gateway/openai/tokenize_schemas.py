"""Requests of ``/tokenize`` and ``/detokenize``, in vLLM's form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, WithJsonSchema

from baton.core.errors import InvalidRequestError
from cluster.gateway.openai.json_body import without_nulls
from cluster.gateway.openai.known_names import check_known
from cluster.gateway.openai.schemas import MESSAGES, explain

_STRICT = ConfigDict(strict=True, extra="forbid", frozen=True)


class TokenizeTextRequest(BaseModel):
    model_config = _STRICT

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatRequest(BaseModel):
    model_config = _STRICT

    model: str | None = None
    messages: Annotated[list[Any], WithJsonSchema(MESSAGES)]
    add_special_tokens: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Any] | None = None
    return_token_strs: bool = False


class DetokenizeRequest(BaseModel):
    model_config = _STRICT

    model: str | None = None
    tokens: Annotated[list[Any], WithJsonSchema({"type": "array", "items": {"type": "integer", "minimum": 0}})]


def parse_tokenize(body: Mapping[str, Any]) -> TokenizeTextRequest | TokenizeChatRequest:
    """Parses a text or a chat, as :func:`parse_strictly`. It must be one of them, without settings of the other."""
    given, of_text, of_chat = without_nulls(body), TokenizeTextRequest.model_fields, TokenizeChatRequest.model_fields
    check_known(given, of_text.keys() | of_chat.keys())
    if ("prompt" in given) == ("messages" in given):
        text = "prompt and messages exclude each other" if "prompt" in given else "There is neither prompt nor messages"
        raise InvalidRequestError(f"{text}; send one of them.", param="prompt")
    sent, other, known = ("prompt", "messages", of_text) if "prompt" in given else ("messages", "prompt", of_chat)
    if alien := next((name for name in given if name not in known), None):
        raise InvalidRequestError(f"{alien} belongs to {other}; leave it out beside {sent}.", param=alien)
    if sent == "prompt":
        return parse_strictly(TokenizeTextRequest, given)
    return parse_strictly(TokenizeChatRequest, given)


ModelT = TypeVar("ModelT", bound=BaseModel)


def parse_strictly(schema: type[ModelT], body: Mapping[str, Any]) -> ModelT:
    """Parses ``body`` for an endpoint that knows the fields of its schema alone. Null means absent.

    Raises:
        InvalidRequestError: a parameter is unknown, missing or mistyped.
    """
    given = without_nulls(body)
    check_known(given, schema.model_fields)
    try:
        return schema.model_validate(given)
    except ValidationError as error:
        raise explain(error) from error
