"""Writes prompts of a given number of tokens. Words are drawn by key, so equal keys give equal text and prefixes are
shared on purpose only."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from baton.bench.endpoint import CHAT
from baton.engine.models.tokenizer import Tokenizer

_MIN_WORDS = 200
_SAMPLE_WORDS = (40, 400)
_MIN_TOKENS_PER_WORD = 0.1
_PLAIN_WORD = re.compile(rb" [a-z]{3,10}")
COMMON_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work number night point home water room mother area money "
    "story fact month lot right study book eye job word business issue side kind head house service friend father "
    "power hour game line end member law car city community name team minute idea body information back parent face "
    "others level office door health person art war history party result change morning reason research girl guy "
    "moment air teacher force education foot boy age policy music food value street market court paper space ground "
    "form event official matter center couple site project base star table need field rate view tree table sound"
)
"""Words for servers with an unknown tokenizer. Most tokenizers have one token for each."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a prompt.

    Attributes:
        key: key of the content. Of two segments with equal keys, the shorter is a prefix of the longer.
        tokens: its length in tokens.
    """

    key: str
    tokens: int


@dataclass(frozen=True, slots=True)
class PromptWriter:
    """Writes segments as text.

    Attributes:
        words: words to draw from.
        tokens_per_word: 1 if every word is one token, which makes lengths exact.
        overhead: tokens that the server adds around the text, such as a BOS token or a chat template.
        salt: texts with different salts have no common prefix.
        source: source of the token counts, for the report.
    """

    words: Sequence[str]
    tokens_per_word: float
    overhead: int
    salt: str
    source: str

    @property
    def is_exact(self) -> bool:
        return self.tokens_per_word == 1.0

    def text_tokens(self, input_tokens: int) -> int:
        """Tokens left for text in a prompt that the server should count as ``input_tokens``; at least one.

        Segments must be planned within these, since cutting a finished text may remove its unique part.
        """
        return max(1, input_tokens - self.overhead)

    def write(self, segments: Sequence[Segment]) -> str:
        """Text with the segments' tokens, without the overhead; at least one word per segment."""
        return " ".join(word for segment in segments for word in self._draw(segment))

    def _draw(self, segment: Segment) -> list[str]:
        count = max(1, round(segment.tokens / self.tokens_per_word))
        return random.Random(f"{self.salt}/{segment.key}").choices(self.words, k=count)


def writer_for_tokenizer(tokenizer: Tokenizer, endpoint: str, salt: str, source: str) -> PromptWriter:
    """A writer that counts with the server's tokenizer and chat template."""
    words = single_token_words(tokenizer)
    if len(words) < _MIN_WORDS:
        words = COMMON_WORDS.split()

    def count(text: str) -> int:
        if endpoint == CHAT and tokenizer.has_chat_template:
            return len(tokenizer.apply_chat_template([{"role": "user", "content": text}]))
        return len(tokenizer.encode(text))

    return calibrated_writer(words, [count(text) for text in sample_texts(words)], salt, source)


def sample_texts(words: Sequence[str]) -> tuple[str, str]:
    """A short and a long text of ``words``, whose counts calibrate a writer."""
    rng = random.Random(0)
    short, long = (" ".join(rng.choices(words, k=count)) for count in _SAMPLE_WORDS)
    return short, long


def calibrated_writer(words: Sequence[str], counts: Sequence[int], salt: str, source: str) -> PromptWriter:
    """A writer calibrated with token counts.

    Args:
        counts: tokens of the two :func:`sample_texts` of ``words``, as the server counts them.
    """
    (short_words, long_words), (short, long) = _SAMPLE_WORDS, counts
    tokens_per_word = max(_MIN_TOKENS_PER_WORD, (long - short) / (long_words - short_words))
    overhead = max(0, round(short - short_words * tokens_per_word))
    return PromptWriter(words, tokens_per_word, overhead, salt, source)


def single_token_words(tokenizer: Tokenizer) -> list[str]:
    """Lower-case words that are one token, both after a space and at the beginning of a text."""
    found: list[str] = []
    for token_id in range(tokenizer.vocab_size):
        text = tokenizer.token_bytes(token_id)
        if not _PLAIN_WORD.fullmatch(text):
            continue
        word = text.decode().strip()
        if tokenizer.encode(f" {word}", add_special_tokens=False) != [token_id]:
            continue
        if len(tokenizer.encode(word, add_special_tokens=False)) == 1:
            found.append(word)
    return found
