"""APIs whose requests are chats under other names: how a request is translated, and who makes its answer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Generic

from baton.core.errors import InvalidRequestError
from baton.engine.models.tokenizer import Tokenizer
from cluster.gateway.answers import Answer
from cluster.gateway.openai.plan import GenerationPlan
from cluster.gateway.openai.schemas import ChatCompletionRequest, RequestT


@dataclass(frozen=True, slots=True)
class AnswerSetting:
    """What an answer needs besides its request.

    Attributes:
        request_id: returns the id of the answer, which is final when there is output.
        service_tier: the tier that serves the request; ``None`` if the request names none.
        new_call_id: makes the id of a tool call.
    """

    request_id: Callable[[], str]
    plan: GenerationPlan
    tokenizer: Tokenizer
    service_tier: str | None
    new_call_id: Callable[[], str]


@dataclass(frozen=True, slots=True)
class ChatApi(Generic[RequestT]):
    """Attributes:
    schema: of its requests.
    to_chat: translates a request.
    answer: makes the answer to a request.
    names: its names of a chat's parameters, where they differ, for errors. The first that fits is taken.
    check_headers: raises an error for headers with which a request cannot be answered.
    """

    schema: type[RequestT]
    to_chat: Callable[[RequestT], ChatCompletionRequest]
    answer: Callable[[RequestT, AnswerSetting], Answer]
    names: Mapping[str, str] = field(default_factory=dict)
    check_headers: Callable[[Mapping[str, str]], None] = lambda _: None

    @contextmanager
    def own_names(self) -> Iterator[None]:
        """Errors raised within name the parameters of this API."""
        try:
            yield
        except InvalidRequestError as error:
            if not self.names:
                raise
            words = re.compile("|".join(rf"\b{re.escape(name)}\b" for name in self.names))
            message = words.sub(lambda found: self.names[found[0]], error.message)
            param = error.param and words.sub(lambda found: self.names[found[0]], error.param)
            raise type(error)(message, param=param) from error

    def with_own_names(self, plan: GenerationPlan) -> GenerationPlan:
        """The plan for errors that occur while the answer is made."""
        return replace(plan, grammar_param=self.names.get(plan.grammar_param or "", plan.grammar_param))
