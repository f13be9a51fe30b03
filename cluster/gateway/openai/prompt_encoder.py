"""Token ids of prompts and chats, within bounds of the time that they take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from baton.core.errors import ContextLengthError
from baton.core.request import check_token_ids
from baton.engine.models.literal_specials import LiteralSpecials
from baton.engine.models.tokenizer import Tokenizer
from baton.grammar.compiler import GrammarCompiler
from cluster.gateway.formats.dialect import Dialect
from cluster.gateway.openai.model_inputs import (
    MAX_MESSAGES,
    check_messages,
    check_num_prompts,
    count_messages,
    split_prompts,
)
from cluster.gateway.openai.tool_messages import num_chars
from cluster.gateway.work_threads import WorkThreads
from cluster.requests.generation import ModelCard

_INLINE_CHARS = 4096
"""Longer texts are tokenized in a thread."""
_MESSAGE_CHARS = 64
"""A message costs about as much time as so many characters of text."""
_IDS_PER_CHAR = 16
"""So many token ids cost about as much time as a character of text."""
_PROBED_CHARS = 16
"""Characters per token of the context that are encoded first of a text that has many more."""

_P = ParamSpec("_P")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation as a client sent it, and how to render it. Messages are not checked yet, tools are."""

    messages: Sequence[Any]
    tools: Sequence[dict[str, Any]] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


class PromptEncoder:
    """Encodes prompts and chats of one served model.

    Args:
        dialect: how the model writes calls and reasoning; ``None`` finds it out.
        grammars: compiles grammars for the model; ``None`` makes one when it is needed.
        specials_are_text: special tokens in the content of messages are encoded as text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        threads: WorkThreads,
        dialect: Dialect | None = None,
        grammars: GrammarCompiler | None = None,
        *,
        specials_are_text: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.threads = threads
        self.dialect = Dialect(tokenizer) if dialect is None else dialect
        self.grammars = grammars
        self._specials_are_text = specials_are_text

    async def split(
        self, prompt: Any, max_prompts: int, card: ModelCard, *, may_be_long: bool = False
    ) -> list[str | list[int]]:
        """Single prompts, see :func:`split_prompts`; arguments and errors as for :meth:`encode_prompts`.

        Lists that are too long are refused before their entries are looked at.
        """
        check_num_prompts(prompt, max_prompts)
        items = prompt[:max_prompts] if isinstance(prompt, list) else ()
        lists = [item for item in (prompt, *items) if isinstance(item, list)]
        longest = max(map(len, lists), default=0)
        if longest > max(card.max_model_len, max_prompts) and not may_be_long:
            raise ContextLengthError(
                f"This model's context is {card.max_model_len} tokens, prompt and output together, but prompt has a "
                f"list of {longest} entries. Shorten it.",
                param="prompt",
            )
        return await self.off_loop(sum(map(len, lists)) // _IDS_PER_CHAR, split_prompts, prompt, max_prompts)

    async def encode_prompts(
        self,
        prompts: Sequence[str | list[int]],
        card: ModelCard,
        add_special_tokens: bool,
        *,
        echo: bool = False,
        may_be_long: bool = False,
    ) -> list[tuple[list[int], str]]:
        """Returns (token ids, text to echo) of each prompt.

        Args:
            may_be_long: whether a prompt may have more tokens than the context.

        Raises:
            BatonError: a prompt is too long, or has token ids beyond the vocabulary.
        """
        for prompt in prompts:
            if isinstance(prompt, str):
                self._check_length(len(prompt), card, "prompt")

        def encode() -> list[tuple[list[int], str]]:
            encoded = []
            for prompt in prompts:
                if isinstance(prompt, str):
                    if not may_be_long:
                        self._check_part(prompt, card, "prompt")
                    encoded.append((self.tokenizer.encode(prompt, add_special_tokens), prompt if echo else ""))
                else:
                    check_token_ids(prompt, card.vocab_size, "prompt")
                    encoded.append((prompt, self.tokenizer.decode(prompt) if echo else ""))
            return encoded

        # Many short prompts take as long as a long one.
        size = sum(
            len(prompt) if echo or isinstance(prompt, str) else len(prompt) // _IDS_PER_CHAR for prompt in prompts
        )
        return await self.off_loop(size, encode)

    async def encode_chat(self, chat: Chat, card: ModelCard, *, may_be_long: bool = False) -> list[int]:
        """Token ids of a rendered chat; arguments and errors as for :meth:`encode_prompts`."""
        # A message has at least one token.
        count = count_messages(chat.messages, min(card.max_model_len, MAX_MESSAGES))
        messages = await self.off_loop(_MESSAGE_CHARS * count, check_messages, chat.messages)
        size = num_chars(messages, chat.tools)
        self._check_length(size, card, "messages")

        def encode() -> list[int]:
            literal = LiteralSpecials(self.tokenizer.special_tokens_as_text) if self._specials_are_text else None
            inputs, listed = self.dialect.template_inputs(
                *((literal.hide(messages), literal.hide(chat.tools)) if literal else (messages, chat.tools))
            )
            text = self.tokenizer.render_chat(
                inputs,
                add_generation_prompt=chat.add_generation_prompt,
                continue_final_message=chat.continue_final_message,
                template_kwargs=chat.template_kwargs,
                tools=listed,
            )
            if not may_be_long:
                self._check_part(text, card, "messages")
            if literal is not None and literal.occurs_in(text):
                return self.tokenizer.encode_pieces(literal.split(text), chat.add_special_tokens)
            return self.tokenizer.encode(text, chat.add_special_tokens)

        return await self.off_loop(size + _MESSAGE_CHARS * len(messages), encode)

    def _check_length(self, num_chars: int, card: ModelCard, param: str) -> None:
        """Refuses text that is too long for the context before it is tokenized.

        The factor 4 leaves room for normalizers that shorten the text.
        """
        if num_chars > 4 * card.max_model_len * self.tokenizer.max_token_chars:
            raise ContextLengthError(
                f"This model's context is {card.max_model_len} tokens, but {param} has {num_chars} characters, "
                f"more than {card.max_model_len} tokens can hold. Shorten it.",
                param=param,
            )

    def _check_part(self, text: str, card: ModelCard, param: str) -> None:
        """Encodes a part of a text that is likely to be too long, so that no request costs more than a long prompt.

        Raises:
            ContextLengthError: that part alone is too long.
        """
        num_chars = _PROBED_CHARS * card.max_model_len
        if len(text) <= 2 * num_chars:
            return
        found = len(self.tokenizer.encode(text[:num_chars], add_special_tokens=False))
        if found > 2 * card.max_model_len:  # the factor is for tokens that the rest of the text would change
            raise ContextLengthError(
                f"This model's context is {card.max_model_len} tokens, prompt and output together, but the first "
                f"{num_chars} of {len(text)} characters of {param} alone have {found} tokens. Shorten it.",
                param=param,
            )

    async def off_loop(self, size: int, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Calls ``function``, in a thread if it takes as long as a long text, since it would delay all other streams.

        Args:
            size: its work, in characters of text.
        """
        if size > _INLINE_CHARS:
            return await self.threads.run(size, function, *args, **kwargs)
        return function(*args, **kwargs)
