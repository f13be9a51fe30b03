"""Log probabilities of tokens in the forms of OpenAI's completions and of vLLM's ``prompt_logprobs``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.core.prompt_logprobs import PromptLogprobs
from baton.engine.models.tokenizer import Tokenizer

Json = dict[str, Any]

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot express. OpenAI uses the same number."""


def finite(logprob: float) -> float:
    """The number itself, or :data:`MIN_LOGPROB` for smaller ones and NaN."""
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB


@dataclass(slots=True)
class CompletionLogprobs:
    """The ``logprobs`` of a completion, token by token."""

    tokenizer: Tokenizer
    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def add(self, token_id: int, logprob: float | None, top: Iterable[tuple[int, float]], offset: int) -> None:
        """Adds a token. ``None`` for the log probability stands for a token that nothing comes before.

        Args:
            top: the most likely tokens and their log probabilities.
            offset: start of its text, in characters.
        """
        self.tokens.append(self._key(token_id))
        self.token_logprobs.append(None if logprob is None else finite(logprob))
        self.top_logprobs.append(None if logprob is None else self._by_text((*top, (token_id, logprob))))
        self.text_offset.append(offset)

    def to_json(self, before: CompletionLogprobs | None = None) -> Json:
        """The JSON object; the tokens of ``before`` come first."""
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        return {name: [*(getattr(before, name) if before else ()), *getattr(self, name)] for name in names}

    def _by_text(self, top: Iterable[tuple[int, float]]) -> dict[str, float]:
        """If tokens have equal text, the most likely one counts."""
        found: dict[str, float] = {}
        for token_id, logprob in top:
            found.setdefault(self._key(token_id), finite(logprob))
        return found

    def _key(self, token_id: int) -> str:
        """The token's text, or ``bytes:\\xe2\\x82`` as OpenAI writes incomplete UTF-8."""
        raw = self.tokenizer.token_bytes(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


@dataclass(frozen=True, slots=True)
class DescribedPrompt:
    """What an answer tells of one prompt.

    Attributes:
        echoed: its part of a completion's ``logprobs``; ``None`` if they are not echoed.
        listed: vLLM's ``prompt_logprobs``; ``None`` if they are not wanted.
    """

    echoed: CompletionLogprobs | None
    listed: list[Json | None] | None


def describe_prompt(
    token_ids: Sequence[int],
    text: str,
    found: PromptLogprobs,
    tokenizer: Tokenizer,
    echoed_top: int | None,
    listed_top: int | None,
) -> DescribedPrompt:
    """Takes about a microsecond per number.

    Args:
        text: the prompt as it is echoed.
        echoed_top, listed_top: how many of the most likely tokens the two forms show; ``None`` leaves a form out.
    """
    tops = [
        list(zip(*row, strict=True)) for row in zip(found.top_ids.tolist(), found.top_logprobs.tolist(), strict=True)
    ]
    logprobs: list[float] = found.logprobs.tolist()
    echoed: CompletionLogprobs | None = None
    if echoed_top is not None:
        echoed = CompletionLogprobs(tokenizer)
        values: list[float | None] = [None, *logprobs]
        for token_id, logprob, top, offset in zip(
            token_ids, values, [[], *tops], _offsets(token_ids, text, tokenizer), strict=True
        ):
            echoed.add(token_id, logprob, top[:echoed_top], offset)
    listed: list[Json | None] | None = None
    if listed_top is not None:
        rows = zip(token_ids[1:], logprobs, found.ranks.tolist(), tops, strict=True)
        listed = [None, *(_listed(own, logprob, rank, top[:listed_top], tokenizer) for own, logprob, rank, top in rows)]
    return DescribedPrompt(echoed, listed)


def _listed(token_id: int, logprob: float, rank: int, top: Sequence[tuple[int, float]], tokenizer: Tokenizer) -> Json:
    """The prompt's own token first, then the most likely ones, by token id."""
    entries = {token_id: (logprob, rank)}
    for place, (other, value) in enumerate(top, 1):
        entries.setdefault(other, (value, place))
    return {
        str(token): {"logprob": finite(value), "rank": place, "decoded_token": tokenizer.token_text(token)}
        for token, (value, place) in entries.items()
    }


def _offsets(token_ids: Sequence[int], text: str, tokenizer: Tokenizer) -> Iterator[int]:
    """Where each token's text begins in ``text``. Special tokens that it does not show have no length."""
    special = {token_id for token_id in set(token_ids) if tokenizer.is_special(token_id)}
    shown = {token_id for token_id in special if tokenizer.token_text(token_id) in text}
    detokenizer, offset = tokenizer.detokenizer(shown_token_ids=shown), 0
    for token_id in token_ids:
        yield min(offset, len(text))
        offset += len(detokenizer.push_one(token_id))
