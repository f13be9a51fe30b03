"""Suffix decoding: drafts what followed the last occurrence of the same tokens, in this request or earlier outputs.

Oliaro et al., "SuffixDecoding", 2024, with suffix automata in place of suffix trees. It needs no model and no state in
hand-offs, only the tokens. The longer the match, the longer the draft and the higher its confidence.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from baton.core.drafts import Draft, ScheduledSequence
from baton.core.request import Request
from baton.engine.contracts import VerifyResult
from decode_worker.speculation.acceptance import AcceptanceTracker, num_right
from decode_worker.speculation.method import Outlook
from decode_worker.speculation.suffix_automaton import Match, SuffixAutomaton, continuation

_MIN_MATCH = 2
_MAX_CORPUS_TOKENS = 32_768
_MAX_CORPORA = 32
_MAX_OWN_TOKENS = 4096
"""Limit of a new request's tokens that are learned, counted from the end: they are learned at once in the engine's
thread, while other requests wait. Generated tokens are learned one by one."""
_SEPARATOR = -1  # between outputs; no token has this id
# Acceptance by bucket of the match's length, before any measurement.
_PRIORS = (0.2, 0.35, 0.45, 0.55, 0.65, 0.75, 0.82, 0.88)


@dataclass(slots=True)
class _Corpus:
    """The outputs of earlier requests with the same cache salt. The version changes when old ones are dropped."""

    tokens: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    version: int = 0

    def add(self, output: Sequence[int]) -> None:
        if len(self.tokens) > _MAX_CORPUS_TOKENS:
            self.tokens = SuffixAutomaton(self.tokens.token_ids[len(self.tokens) // 2 :])
            self.version += 1
        self.tokens.extend(output)
        self.tokens.extend([_SEPARATOR])


@dataclass(slots=True)
class _Sequence:
    """A request's own tokens since position ``start``, the state of its end in the corpus of earlier outputs, and the
    origin of its latest draft."""

    start: int
    corpus: _Corpus
    own: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    corpus_state: tuple[int, int] = (0, 0)
    corpus_version: int = 0
    num_prompt_tokens: int = 0
    drafted_from: tuple[str, int, tuple[int, ...]] | None = None


class SuffixProposer:
    """A :class:`~.method.DraftMethod`.

    Args:
        remembers_outputs: also draft from the outputs of earlier requests with the same cache salt.
    """

    def __init__(self, *, remembers_outputs: bool = False) -> None:
        self._remembers_outputs = remembers_outputs
        self._sequences: dict[str, _Sequence] = {}
        self._corpora: OrderedDict[str, _Corpus] = OrderedDict()  # by cache salt, the least recently used first
        self._acceptance = AcceptanceTracker()

    def propose(self, plan: Sequence[ScheduledSequence], room: Mapping[str, int]) -> dict[str, Draft]:
        """Drafts where the end of a sequence was seen before."""
        drafts = {}
        for scheduled in plan:
            request = scheduled.request
            limit = room.get(request.request_id, 0)
            if limit and (draft := self._propose_one(request, limit)) is not None:
                drafts[request.request_id] = draft
        return drafts

    def outlook(self, requests: Sequence[Request], room: Mapping[str, int]) -> Outlook | None:
        """``None``: drafts are looked up in tokens that are already known."""
        return None

    def observe(self, result: VerifyResult) -> None:
        sequence = self._sequences.get(result.sequence.request.request_id)
        if sequence is None or sequence.drafted_from is None:
            return
        source, match_length, drafts = sequence.drafted_from

        def key_of(position: int) -> tuple[tuple[str, int], float]:
            bucket = _bucket(match_length + position)
            return (source, bucket), _PRIORS[bucket]

        num_known = min(len(drafts), len(result.token_ids))
        self._acceptance.record_chain(num_known, num_right(drafts, result.token_ids), key_of)

    def release(self, request_id: str) -> None:
        """Adds the request's output to the corpus."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None or not self._remembers_outputs:
            return
        sequence.corpus.add(sequence.own.token_ids[max(0, sequence.num_prompt_tokens - sequence.start) :])

    def _corpus_of(self, salt: str) -> _Corpus:
        corpus = self._corpora.setdefault(salt, _Corpus())
        self._corpora.move_to_end(salt)
        if len(self._corpora) > _MAX_CORPORA:
            self._corpora.popitem(last=False)
        return corpus

    def _propose_one(self, request: Request, max_draft_tokens: int) -> Draft | None:
        sequence = self._catch_up(request)
        sequence.drafted_from = None
        own = sequence.own.repetition()
        corpus = sequence.corpus.tokens
        known = corpus.occurrence(*sequence.corpus_state)
        if max(own.length, known.length) < _MIN_MATCH:
            return None
        # Of equally long matches, the request's own is the better guess.
        if own.length >= known.length:
            source, match, tokens = "own", own, sequence.own.token_ids
        else:
            source, match, tokens = "corpus", known, corpus.token_ids
        drafts = _until_separator(continuation(tokens, match, max_draft_tokens))
        if not drafts:
            return None
        sequence.drafted_from = (source, match.length, drafts)
        return Draft(drafts, confidences=self._confidences(source, match, len(drafts)))

    def _confidences(self, source: str, match: Match, count: int) -> tuple[float, ...]:
        """The confidences of ``count`` drafts. Each accepted draft extends the match, so the next is more certain."""
        buckets = [_bucket(match.length + position) for position in range(count)]
        return tuple(self._acceptance.estimate((source, bucket), _PRIORS[bucket]) for bucket in buckets)

    def _catch_up(self, request: Request) -> _Sequence:
        sequence = self._sequences.get(request.request_id)
        if sequence is None:
            start, corpus = max(0, request.num_tokens - _MAX_OWN_TOKENS), self._corpus_of(request.cache_salt)
            sequence = _Sequence(start, corpus, num_prompt_tokens=request.num_prompt_tokens)
            self._sequences[request.request_id] = sequence
        news = request.tokens_between(sequence.start + len(sequence.own), request.num_tokens)
        sequence.own.extend(news)
        corpus = sequence.corpus
        if sequence.corpus_version != corpus.version:
            sequence.corpus_version, sequence.corpus_state = corpus.version, (0, 0)
        if len(corpus.tokens):
            for token in news:
                sequence.corpus_state = corpus.tokens.advance(*sequence.corpus_state, token)
        return sequence


def _bucket(match_length: int) -> int:
    """The bucket of a match's length: 1, 2, 3, 4, 5–6, 7–9, 10–15 and more tokens."""
    for bucket, limit in enumerate((1, 2, 3, 4, 6, 9, 15)):
        if match_length <= limit:
            return bucket
    return len(_PRIORS) - 1


def _until_separator(token_ids: tuple[int, ...]) -> tuple[int, ...]:
    return token_ids[: token_ids.index(_SEPARATOR)] if _SEPARATOR in token_ids else token_ids
