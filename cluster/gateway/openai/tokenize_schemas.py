"""Requests of ``/tokenize`` and ``/detokenize``, in vLLM's form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, WithJsonSchema

from cluster.gateway.openai.schemas import MESSAGES, check_known, explain, without_nulls

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
    return_token_strs: bool = False


class DetokenizeRequest(BaseModel):
    model_config = _STRICT

    model: str | None = None
    tokens: Annotated[list[Any], WithJsonSchema({"type": "array", "items": {"type": "integer", "minimum": 0}})]


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
