"""Server-sent events are found wherever the network cuts the stream."""

from hypothesis import given
from hypothesis import strategies as st

from baton.client.event_stream import EventSplitter, has_text


@given(st.lists(st.integers(1, 9), max_size=40))
def test_events_are_found_wherever_the_network_splits_them(cuts):
    stream = b": comment\r\ndata: one\r\n\r\ndata:two\n\nevent: x\ndata: three\n\n"
    splitter, found, position = EventSplitter(), [], 0
    for cut in [*cuts, len(stream)]:
        found += splitter.feed(stream[position : position + cut])
        position += cut
    assert found == [b"one", b"two", b"three"]


def test_reasoning_counts_as_text():
    assert has_text({"choices": [{"delta": {"reasoning_content": "hm"}}]})
    assert not has_text({"choices": [{"delta": {"content": None}}]})
    assert not has_text({"choices": []})
