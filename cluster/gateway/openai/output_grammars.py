"""The grammar of a request's whole output, checked before a worker sees it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from baton.core.errors import InvalidRequestError
from baton.grammar.compiler import GrammarCompiler
from baton.grammar.forms import beyond_white_space, json_grammar, regex_grammar
from cluster.gateway.formats.base import CallRule
from cluster.gateway.openai.nested import wrong
from cluster.gateway.openai.prompt_encoder import PromptEncoder
from cluster.gateway.openai.schemas import ChatCompletionRequest, CompletionRequest
from cluster.gateway.openai.structured import AskedGrammar, asked_grammar
from cluster.gateway.openai.tool_use import ToolUse
from cluster.requests.generation import ModelCard


class OutputGrammars:
    """Builds and checks the grammars of one served model."""

    def __init__(self, encoder: PromptEncoder) -> None:
        self._tokenizer = encoder.tokenizer
        self._dialect = encoder.dialect
        self._threads = encoder.threads
        self._compiler = encoder.grammars

    async def of_completion(self, request: CompletionRequest, card: ModelCard) -> AskedGrammar | None:
        """The grammar that the request asks for; ``None`` for none.

        Raises:
            InvalidRequestError: it cannot be honoured; ``param`` names what asks for it.
        """
        return await self._checked(asked_grammar(request), card)

    async def of_chat(
        self, request: ChatCompletionRequest, tools: ToolUse, prompt_end: str, card: ModelCard
    ) -> AskedGrammar | None:
        """Like :meth:`of_completion`, for reasoning and then an answer or calls.

        Args:
            prompt_end: see :meth:`Dialect.prompt_end`.
        """
        asked = asked_grammar(request)
        rule = tools.rule(has_answer=asked is not None)
        if self._dialect.needs_parser(tools.functions) and (asked is not None or rule is not None):
            asked = asked or AskedGrammar("tools", "")
            asked = replace(asked, grammar=self._dialect.grammar(rule, asked.grammar, prompt_end))
        try:
            return await self._checked(asked, card)
        except InvalidRequestError:
            if rule is not None:
                await self._check_tools(rule, card)
            raise

    async def _check_tools(self, rule: CallRule, card: ModelCard) -> None:
        """Raises :class:`InvalidRequestError` with the name of the first function whose schema cannot be honoured."""
        for function in rule.functions:
            try:
                await self._checked(AskedGrammar("tools", json_grammar(rule.schema_of(function))), card)
            except InvalidRequestError as error:
                raise function.refused(error) from error

    async def _check_whitespace(self, pattern: str, path: str, card: ModelCard) -> None:
        """Raises :class:`InvalidRequestError` with its path if the white space cannot be honoured by itself, or is
        none in JSON."""
        try:
            await self._checked(AskedGrammar(path, regex_grammar(pattern)), card)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{path}: {error.message}", param=path) from error
        try:
            await self._checked(AskedGrammar(path, beyond_white_space(pattern)), card)
        except InvalidRequestError:
            return  # there is no such text
        raise wrong(path, "must match only the white space of JSON: spaces, tabs and line ends.")

    async def _checked(self, asked: AskedGrammar | None, card: ModelCard) -> AskedGrammar | None:
        """Compiles a grammar in a thread, only to see whether that is possible: a worker compiles it again."""
        if asked is None:
            return None
        if self._compiler is None:
            self._compiler = GrammarCompiler(self._tokenizer.to_json, card.vocab_size, ())
        if asked.whitespace is not None:
            await self._check_whitespace(*asked.whitespace, card)
        try:
            await self._threads.run(len(asked.grammar), self._compiler.compile, asked.grammar)
        except InvalidRequestError as error:
            error.param = asked.param
            raise
        return asked


@contextmanager
def naming_grammar(param: str | None) -> Iterator[None]:
    """Grammars that become too complex while the answer is made are errors of the parameter that asks for them."""
    try:
        yield
    except InvalidRequestError as error:
        error.param = error.param or param
        raise
