"""From the tokens of a sequence to text: detokenization, stop strings, logprobs and token counts."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

from baton.core.errors import InternalError
from baton.core.prompt_logprobs import PromptLogprobs
from baton.core.request import FinishReason, TokenLogprobs
from baton.core.rounds import RoundLog
from baton.engine.models.detokenizer import IncrementalDetokenizer
from cluster.gateway.formats.base import Event, OutputParser
from cluster.requests.generation import TokenChunk


@dataclass(frozen=True, slots=True)
class StopConditions:
    """Conditions on the text that end a sequence.

    Attributes:
        strings: text that ends the output; none of them is empty.
        include_in_output: the output ends with the stop string, or with the stop token's text.
        min_tokens: a stop string that completes before this many tokens is ordinary text.
    """

    strings: tuple[str, ...] = ()
    include_in_output: bool = False
    min_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """A token whose text was released.

    Attributes:
        text_offset: start of its text in the sequence's output, in characters.
    """

    token_id: int
    text_offset: int
    logprobs: TokenLogprobs


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """The text, logprobs and tokens that one chunk added.

    Attributes:
        entries: empty when the request asked for no logprobs.
        prompt_logprobs: those of the prompt, with the first chunk, if the request asked for them.
        token_ids: the chunk's tokens up to the sequence's end, whether or not their text was released.
        events: with a parser, what the text means; ``text`` is empty then.
        stop_string: the stop string that ended the output; empty if none did.
        rounds: those of the whole output, with its end, if they are wanted.
    """

    text: str = ""
    entries: tuple[TokenEntry, ...] = ()
    finish_reason: FinishReason | None = None
    token_ids: tuple[int, ...] = ()
    events: tuple[Event, ...] = ()
    prompt_logprobs: PromptLogprobs | None = None
    stop_string: str = ""
    rounds: RoundLog | None = None


class StopMatcher:
    """Finds the first complete stop string in a stream of characters, and how many characters may start one.

    Each string has a Knuth-Morris-Pratt automaton. Each character costs amortised constant time per string, and the
    result does not depend on how the text is cut into pieces. If two strings end together, the longer one wins.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        self._patterns = [(string, _failure_table(string)) for string in strings]
        self._matched = [0] * len(self._patterns)

    @property
    def num_held_chars(self) -> int:
        """Length of the longest suffix of the text so far that is a prefix of a stop string."""
        return max(self._matched, default=0)

    def push(self, text: str, armed: bool = True) -> tuple[int, int] | None:
        """Reads ``text``. While not ``armed``, complete stop strings count as ordinary text.

        Returns:
            ``None``, or ``(end, length)`` of the match: it ends before index ``end`` of ``text`` and has ``length``
            characters, of which some may be in earlier text.
        """
        if not self._patterns:
            return None
        for index, char in enumerate(text):
            completed = self._step(char)
            if completed and armed:
                return index + 1, completed
        return None

    def _step(self, char: str) -> int:
        completed = 0
        for number, (pattern, failure) in enumerate(self._patterns):
            state = self._matched[number]
            while state and pattern[state] != char:
                state = failure[state - 1]
            if pattern[state] == char:
                state += 1
            if state == len(pattern):
                completed = max(completed, state)
                state = failure[state - 1]
            self._matched[number] = state
        return completed


def _failure_table(pattern: str) -> list[int]:
    """For each prefix of ``pattern``, the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(pattern)
    length = 0
    for index in range(1, len(pattern)):
        while length and pattern[index] != pattern[length]:
            length = table[length - 1]
        if pattern[index] == pattern[length]:
            length += 1
        table[index] = length
    return table


class OutputProcessor:
    """Turns the chunks of one sequence into text.

    It takes every chunk until :attr:`is_finished`. The caller then closes the generator, which cancels the work.

    Args:
        parser: finds calls and reasoning in the text, after stop strings; ``None``: the text is passed on.
        has_output: False drops all tokens, for clients that only want to know about their prompt.
        rounds: gets the rounds of the chunks; ``None`` drops them.
    """

    def __init__(
        self,
        detokenizer: IncrementalDetokenizer,
        stop: StopConditions,
        parser: OutputParser | None = None,
        *,
        has_output: bool = True,
        rounds: RoundLog | None = None,
    ) -> None:
        self._has_output = has_output
        self._rounds = rounds
        self._detokenizer = detokenizer
        self._parser = parser
        self._stop = stop
        self._matcher = StopMatcher(stop.strings)
        self._held = ""
        self._num_released_chars = 0
        # Entries that are not released yet, with the end of their text, in order.
        self._waiting: deque[tuple[TokenEntry, int]] = deque()
        self.num_completion_tokens = 0
        self.num_cached_tokens = 0
        self.num_drafted = 0
        self.num_accepted = 0
        self.finish_reason: FinishReason | None = None
        self._stop_string = ""

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def process(self, chunk: TokenChunk) -> OutputDelta:
        """The text, logprobs and finish reason that ``chunk`` releases.

        Tokens after the one that completes a stop string are ignored and not counted.

        Raises:
            InternalError: the chunk contradicts the contract of :class:`~cluster.requests.generation.TokenChunk`.
        """
        if self.is_finished:
            raise InternalError("A worker sent a chunk of a sequence that had ended.")
        if chunk.finish_reason not in (None, FinishReason.STOP, FinishReason.LENGTH):
            raise InternalError(
                f"A sequence ended with {chunk.finish_reason}, which is not a finish reason for clients."
            )
        if chunk.logprobs is not None and len(chunk.logprobs) != len(chunk.token_ids):
            raise InternalError(f"A chunk has {len(chunk.token_ids)} tokens but {len(chunk.logprobs)} logprobs.")
        self.num_cached_tokens = max(self.num_cached_tokens, chunk.num_cached_tokens)
        if not self._has_output:
            self.finish_reason = FinishReason.LENGTH
            return OutputDelta(
                finish_reason=self.finish_reason, prompt_logprobs=chunk.prompt_logprobs, rounds=self._rounds
            )
        self.num_drafted += chunk.num_drafted
        self.num_accepted += chunk.num_accepted
        pieces: list[str] = []
        events: list[Event] = []
        num_before = self.num_completion_tokens
        stop_token = ""
        last = len(chunk.token_ids) - 1
        for index, token_id in enumerate(chunk.token_ids):
            ends_by_token = index == last and chunk.finish_reason is FinishReason.STOP
            is_shown = self._stop.include_in_output or not ends_by_token
            text = self._detokenizer.push_one(token_id) if is_shown else ""
            self.num_completion_tokens += 1
            if chunk.logprobs is not None:
                start = self._num_chars
                entry = TokenEntry(token_id, start, chunk.logprobs[index])
                self._waiting.append((entry, start + len(text)))
            pieces.append(self._advance(text))
            if ends_by_token:
                stop_token = text
            if self._parser is not None:
                events += self._parser.push_token("" if ends_by_token or self.is_finished else pieces.pop())
                if self._parser.is_complete and not self.is_finished:
                    self._finish(FinishReason.STOP)
            if self.is_finished:
                break
        if not self.is_finished and chunk.finish_reason is not None:
            pieces.append(self._advance(self._detokenizer.flush()))
            if not self.is_finished:
                pieces.append(self._finish(chunk.finish_reason))
        if self._parser is not None and self.is_finished:
            shown = (self._stop_string or stop_token) if self._stop.include_in_output else ""
            events += self._parser.push("".join(pieces).removesuffix(shown))
            pieces.clear()
            is_cut = self._stop_string or self.finish_reason is FinishReason.LENGTH
            events += self._parser.finish(self._stop_string if is_cut else None, shown)
        self.num_accepted = min(self.num_accepted, self.num_completion_tokens)  # a stop string may have cut some off
        taken = chunk.token_ids[: self.num_completion_tokens - num_before]
        if self._rounds is not None and chunk.round is not None:
            self._rounds.add(replace(chunk.round, token_ids=taken))
        return OutputDelta(
            "".join(pieces),
            self._release_entries(),
            self.finish_reason,
            taken,
            tuple(events),
            chunk.prompt_logprobs,
            self._stop_string,
            self._rounds if self.is_finished else None,
        )

    @property
    def num_reasoning_tokens(self) -> int:
        return 0 if self._parser is None else self._parser.num_reasoning_tokens

    @property
    def _num_chars(self) -> int:
        return self._num_released_chars + len(self._held)

    def _advance(self, text: str) -> str:
        """Adds ``text`` and returns the characters that can no longer become part of a stop string."""
        if not text:
            return ""
        if not self._stop.strings:
            self._num_released_chars += len(text)
            return text
        num_before = len(self._held)
        self._held += text
        match = self._matcher.push(text, armed=self.num_completion_tokens >= self._stop.min_tokens)
        if match is not None:
            end, length = match
            cut = num_before + end
            self._stop_string = self._held[cut - length : cut]
            self._held = self._held[: cut if self._stop.include_in_output else cut - length]
            return self._finish(FinishReason.STOP)
        return self._release(len(self._held) - self._matcher.num_held_chars)

    def _release(self, num_chars: int) -> str:
        released, self._held = self._held[:num_chars], self._held[num_chars:]
        self._num_released_chars += len(released)
        return released

    def _finish(self, reason: FinishReason) -> str:
        self.finish_reason = reason
        return self._release(len(self._held))

    def _release_entries(self) -> tuple[TokenEntry, ...]:
        """Entries of tokens whose text was released. At the end, a token whose text was cut counts too."""
        released: list[TokenEntry] = []
        while self._waiting:
            entry, end = self._waiting[0]
            has_no_text = end == entry.text_offset
            if end > self._num_released_chars and not self.is_finished:
                break
            self._waiting.popleft()
            if entry.text_offset < self._num_released_chars or (has_no_text and end <= self._num_released_chars):
                released.append(entry)
        return tuple(released)
