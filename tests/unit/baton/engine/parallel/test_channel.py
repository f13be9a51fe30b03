"""Messages between ranks, with the follower in a thread."""

from __future__ import annotations

import gc
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from baton.engine.parallel.channel import MEMORY_NAME, Inbox, Outbox, make_pair, read_reply, run_messages


class Ends:
    """Rank 0's end, and followers that note what they get."""

    def __init__(self, size: int) -> None:
        pairs = [make_pair() for _ in range(size)]
        self.own = [own for own, _ in pairs]
        self.outbox = Outbox(self.own)
        self.received: list[list[tuple[Any, ...]]] = [[] for _ in pairs]
        self.gate = threading.Event()
        self.gate.set()
        self.threads = [
            *(threading.Thread(target=self._follow, args=(index, theirs)) for index, (_, theirs) in enumerate(pairs)),
            *(threading.Thread(target=self._read, args=(index,)) for index in range(size)),
        ]
        for thread in self.threads:
            thread.start()

    def _follow(self, index: int, connection: socket.socket) -> None:
        def note(*arguments: Any) -> int:
            self.gate.wait()
            self.received[index].append(arguments)
            return index

        run_messages(Inbox(connection), {"note": note})
        connection.close()

    def _read(self, index: int) -> None:
        while reply := read_reply(self.own[index]):
            self.outbox.handle_reply(index, reply)

    def close(self) -> None:
        self.gate.set()
        for each in self.own:
            each.shutdown(socket.SHUT_RDWR)
        for thread in self.threads:
            thread.join()


@pytest.fixture
def ends() -> Iterator[Ends]:
    found = Ends(2)
    yield found
    found.close()


def test_all_followers_get_all_messages_in_order_and_answer(ends: Ends) -> None:
    for number in range(20):
        ends.outbox.send(("note", number, np.arange(number)))
    assert ends.outbox.answers() == [0, 1]
    for received in ends.received:
        assert [number for number, _ in received] == list(range(20))
        assert all(np.array_equal(array, np.arange(number)) for number, array in received)


def test_a_large_message_gets_larger_memory_and_small_ones_go_on(ends: Ends) -> None:
    large = os.urandom(3 * 2**20)
    for content in (b"small", large, b"small again", large, b""):
        ends.outbox.send(("note", content))
    ends.outbox.answers()
    assert ends.received[0] == ends.received[1] == [(b"small",), (large,), (b"small again",), (large,), (b"",)]


def test_a_place_is_not_used_again_before_it_was_read(ends: Ends) -> None:
    ends.gate.clear()
    sent: list[int] = []

    def send() -> None:
        for number in range(12):
            ends.outbox.send(("note", number))
            sent.append(number)

    sender = threading.Thread(target=send)
    sender.start()
    sender.join(0.2)
    assert sender.is_alive()
    assert len(sent) < 12
    ends.gate.set()
    sender.join()
    ends.outbox.answers()
    assert ends.received[1] == [(number,) for number in range(12)]


def test_a_failure_ends_every_wait(ends: Ends) -> None:
    ends.gate.clear()
    ends.outbox.send(("note", 1))
    threading.Timer(0.1, ends.outbox.fail, (ZeroDivisionError("a rank is lost"),)).start()
    with pytest.raises(ZeroDivisionError, match="a rank is lost"):
        ends.outbox.answers()
    with pytest.raises(ZeroDivisionError):
        ends.outbox.send(("note", 2))


def num_memories() -> int:
    """Memories of channels that this process has mapped."""
    gc.collect()
    names = []
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one that listed the folder
            names.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return sum(MEMORY_NAME in name for name in names)


def test_only_the_largest_memory_is_kept(ends: Ends) -> None:
    before = num_memories()
    for num_bytes in (2**10, 2**21, 2**22):
        ends.outbox.send(("note", os.urandom(num_bytes)))
        ends.outbox.answers()
    ends.outbox.send(("note", b"replaces the last one"))
    ends.outbox.answers()
    assert num_memories() - before == len(ends.own) + 1  # each maps it once
