"""Text of a wanted number of tokens. Its words are drawn by key, so that equal keys make equal text and a prefix can be
shared on purpose and never by accident."""

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
"""For servers whose tokenizer is not at hand. Most tokenizers have one token for each."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a prompt.

    Attributes:
        key: what it holds; of two segments with equal keys, the shorter is the beginning of the longer.
        tokens: how long it is.
    """

    key: str
    tokens: int


@dataclass(frozen=True, slots=True)
class PromptWriter:
    """Writes segments as text.

    Attributes:
        words: to draw from.
        tokens_per_word: 1 when every word is a token by itself, which makes lengths exact.
        overhead: tokens that the server adds around the text: a beginning of sequence, a chat template.
        salt: text of another salt has nothing in common with this one's.
        source: where the counts come from, for the report.
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
        """Tokens that are left for text in a prompt which the server shall count as ``input_tokens``; at least one.

        Segments must share these: what is cut off a finished text may be all that makes it unique.
        """
        return max(1, input_tokens - self.overhead)

    def write(self, segments: Sequence[Segment]) -> str:
        """Text of as many tokens as the segments have, the overhead aside; at least one word for each."""
        return " ".join(word for segment in segments for word in self._draw(segment))

    def _draw(self, segment: Segment) -> list[str]:
        count = max(1, round(segment.tokens / self.tokens_per_word))
        return random.Random(f"{self.salt}/{segment.key}").choices(self.words, k=count)


def writer_for_tokenizer(tokenizer: Tokenizer, endpoint: str, salt: str, source: str) -> PromptWriter:
    """Counts with the tokenizer that the server uses, its chat template included."""
    words = single_token_words(tokenizer)
    if len(words) < _MIN_WORDS:
        words = COMMON_WORDS.split()

    def count(text: str) -> int:
        if endpoint == CHAT and tokenizer.has_chat_template:
            return len(tokenizer.apply_chat_template([{"role": "user", "content": text}]))
        return len(tokenizer.encode(text))

    return calibrated_writer(words, [count(text) for text in sample_texts(words)], salt, source)


def sample_texts(words: Sequence[str]) -> tuple[str, str]:
    """A short and a long text of ``words``, whose counts tell how a server counts."""
    rng = random.Random(0)
    short, long = (" ".join(rng.choices(words, k=count)) for count in _SAMPLE_WORDS)
    return short, long


def calibrated_writer(words: Sequence[str], counts: Sequence[int], salt: str, source: str) -> PromptWriter:
    """
    Args:
        counts: tokens of the two :func:`sample_texts` of ``words``, as the server counts them.
    """
    (short_words, long_words), (short, long) = _SAMPLE_WORDS, counts
    tokens_per_word = max(_MIN_TOKENS_PER_WORD, (long - short) / (long_words - short_words))
    overhead = max(0, round(short - short_words * tokens_per_word))
    return PromptWriter(words, tokens_per_word, overhead, salt, source)


def single_token_words(tokenizer: Tokenizer) -> list[str]:
    """Lower-case words that are one token, behind a space as well as at the beginning of a text."""
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
