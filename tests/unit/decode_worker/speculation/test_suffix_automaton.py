"""The automaton against a search by brute force."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from decode_worker.speculation.suffix_automaton import Match, SuffixAutomaton, continuation

sequences = st.lists(st.integers(0, 2), max_size=40)


def occurs_before(tokens: list[int], length: int) -> bool:
    end = tokens[len(tokens) - length :]
    return any(tokens[start : start + length] == end for start in range(len(tokens) - length))


@given(sequences)
def test_repetition_is_the_longest_suffix_that_occurred_before(tokens: list[int]) -> None:
    automaton = SuffixAutomaton()
    for count, token in enumerate(tokens, start=1):
        automaton.extend([token])
        known = tokens[:count]
        match = automaton.repetition()
        assert match.length == max((n for n in range(1, count) if occurs_before(known, n)), default=0)
        if match.length:
            assert match.end < count - 1
            assert known[match.end - match.length + 1 : match.end + 1] == known[count - match.length :]


@given(sequences, sequences, sequences)
def test_another_sequence_is_matched_as_far_back_as_it_occurs(
    first: list[int], second: list[int], other: list[int]
) -> None:
    automaton = SuffixAutomaton(first)
    state = length = 0
    for count, token in enumerate(other, start=1):
        if count == len(other) // 2:
            automaton.extend(second)  # it may grow while others are matched against it
        state, length = automaton.advance(state, length, token)
        known, text = other[:count], automaton.token_ids
        found = [n for n in range(1, count + 1) if any(text[i : i + n] == known[-n:] for i in range(len(text) - n + 1))]
        if count < len(other) // 2 or not second:
            assert length == max(found, default=0)
        assert length == 0 or length in found
        if length:
            match = automaton.occurrence(state, length)
            assert text[match.end - length + 1 : match.end + 1] == known[-length:]


def test_the_latest_occurrence_is_found() -> None:
    automaton = SuffixAutomaton([1, 2, 3, 1, 2, 4, 1, 2])
    assert automaton.repetition() == Match(length=2, end=4)


def test_continuation_goes_on_periodically() -> None:
    assert continuation([1, 2, 3, 1, 2, 3], Match(3, 2), 7) == (1, 2, 3, 1, 2, 3, 1)
    assert continuation([5, 6, 7, 8], Match(1, 0), 2) == (6, 7)
    assert continuation([], Match(0, -1), 3) == ()
