"""Messages from rank 0 to the other ranks of a worker: the bytes in shared memory, their place over a socket.

    rank 0      memory [ message 7 | message 8 |  …  ]      socket ─ (8, place, length) ─▶ follower
                                                            socket ◀─────────── 8 done ── follower

All followers read the same bytes. A place is used again when every follower is done with the message that was there.
The socket also tells each side at once when the other one has ended. Memory and sockets have no names, so nothing is
left behind by a killed process.
"""

from __future__ import annotations

import mmap
import os
import pickle
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

Message = tuple[Any, ...]
"""A name and its arguments; everything that pickle knows. Both ends are processes of one worker."""

_HEADER = struct.Struct("<QQQ")  # number, place, length
_REPLY = struct.Struct("<Q")  # number of the message that is done
_BEAT = 0
_NUM_PLACES = 4
_LEAST_PLACE_BYTES = 2**20
_MAX_REPLY_BYTES = 2**18
_BEAT_S = 0.5
MEMORY_NAME = "baton-ranks"


class Outbox:
    """Rank 0's end of the channel. One thread sends.

    Args:
        sockets: one per follower, of type ``SOCK_SEQPACKET``.
    """

    def __init__(self, sockets: Sequence[socket.socket]) -> None:
        self._sockets = sockets
        self._number = 0
        self._done = [0] * len(sockets)
        self._answers: list[Any] = [None] * len(sockets)
        self._changed = threading.Condition()
        self._failure: Exception | None = None
        self._memory: mmap.mmap | None = None
        self._place_bytes = 0

    def send(self, message: Message) -> None:
        """Sends a message to all followers; does not wait until they are done with it.

        Raises:
            Exception: the error given to :meth:`fail`.
            OSError: a follower has ended.
        """
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        self._number += 1
        descriptors = self._make_room(len(data))
        memory = self._memory
        if memory is None:
            raise RuntimeError("there is no memory for messages")
        place = self._number % _NUM_PLACES * self._place_bytes
        memory[place : place + len(data)] = data
        header = _HEADER.pack(self._number, place, len(data))
        for each in self._sockets:
            socket.send_fds(each, [header], descriptors)
        for descriptor in descriptors:
            os.close(descriptor)

    def answers(self) -> list[Any]:
        """Waits until all followers are done; returns what their handlers returned. Raises what :meth:`send` does."""
        self._wait_for(self._number)
        return list(self._answers)

    @property
    def is_answered(self) -> bool:
        """Whether all followers are done with some message: the first one makes them load the model."""
        return min(self._done) > _BEAT

    def handle_reply(self, follower: int, reply: bytes) -> None:
        """Takes what a follower sent. Any thread may call it."""
        (number,) = _REPLY.unpack_from(reply)
        if number == _BEAT:
            return
        with self._changed:
            self._done[follower] = number
            if len(reply) > _REPLY.size:
                self._answers[follower] = pickle.loads(reply[_REPLY.size :])
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """Makes :meth:`send` and :meth:`wait` raise ``error`` from now on. Any thread may call it."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def _make_room(self, num_bytes: int) -> list[int]:
        """Returns the descriptors to send with the next message: that of new memory, if it needs more."""
        if num_bytes <= self._place_bytes:
            self._wait_for(self._number - _NUM_PLACES)
            return []
        self._wait_for(self._number - 1)
        self._place_bytes = max(_LEAST_PLACE_BYTES, 2 ** (num_bytes - 1).bit_length())
        descriptor = os.memfd_create(MEMORY_NAME, os.MFD_CLOEXEC)
        os.ftruncate(descriptor, _NUM_PLACES * self._place_bytes)
        self._memory = mmap.mmap(descriptor, _NUM_PLACES * self._place_bytes)
        return [descriptor]

    def _wait_for(self, number: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or min(self._done) >= number)
            if self._failure is not None:
                raise self._failure


class Inbox:
    """A follower's end of the channel. Tells rank 0 twice a second that this process is not frozen."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._memory: mmap.mmap | None = None
        self._number = _BEAT
        self._ended = threading.Event()
        threading.Thread(target=self._beat, name="baton-rank-beat", daemon=True).start()

    def receive(self) -> Message | None:
        """Waits for the next message; ``None`` when rank 0 has ended."""
        header, descriptors, _, _ = socket.recv_fds(self._connection, _HEADER.size, 1)
        if not header:
            self._ended.set()
            return None
        for descriptor in descriptors:
            self._memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
            os.close(descriptor)
        if self._memory is None:
            raise RuntimeError("a message came before its memory")
        self._number, place, length = _HEADER.unpack(header)
        message: Message = pickle.loads(self._memory[place : place + length])
        return message

    def done(self, answer: object = None) -> None:
        """Tells rank 0 that the last message is done, and what its handler returned."""
        self._reply(_REPLY.pack(self._number) + (b"" if answer is None else pickle.dumps(answer)))

    def _beat(self) -> None:
        while not self._ended.wait(_BEAT_S):
            self._reply(_REPLY.pack(_BEAT))

    def _reply(self, reply: bytes) -> None:
        try:
            self._connection.send(reply)
        except OSError:  # rank 0 has ended, which receive() notices
            self._ended.set()


def read_reply(connection: socket.socket) -> bytes:
    """What a follower sent; empty when it has ended."""
    try:
        return connection.recv(_MAX_REPLY_BYTES)
    except ConnectionError:
        return b""


def make_pair() -> tuple[socket.socket, socket.socket]:
    """The two ends of a follower's socket."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def run_messages(inbox: Inbox, handlers: dict[str, Callable[..., object]]) -> None:
    """Runs a handler for each message, by its name, until rank 0 ends."""
    while (message := inbox.receive()) is not None:
        name, *arguments = message
        inbox.done(handlers[name](*arguments))
