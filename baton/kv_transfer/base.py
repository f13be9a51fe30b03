"""The contracts of hand-offs. A transfer is: reserve → push missing parts → commit → acknowledge."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.core.kv_spec import KVCacheSpec, KVEncoding

Payload = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Pieces:
    """A payload in place: ordered views of a cache, which do not change until they have been sent."""

    views: tuple[memoryview, ...]
    num_bytes: int

    def __len__(self) -> int:
        return self.num_bytes


@dataclass(frozen=True, slots=True)
class TransferOffer:
    """A sender's request for room.

    Attributes:
        token_ids: the whole prompt, so that the receiver can say which prefix it holds already.
        deadline_s: how long the receiver may wait for room.
        encodings: encodings that the sender can use, the best one first. Native parts are always possible.
        cache_salt: :attr:`baton.core.request.Request.cache_salt` of the prompt.
    """

    transfer_id: str
    spec: KVCacheSpec
    token_ids: tuple[int, ...]
    deadline_s: float
    encodings: tuple[KVEncoding, ...] = ()
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class PartHeader:
    """Layers ``[layer_start, layer_end)`` at positions ``[token_start, token_start + token_count)``."""

    token_start: int
    token_count: int
    layer_start: int
    layer_end: int
    encoding: KVEncoding = KVEncoding.NATIVE

    @property
    def token_end(self) -> int:
        return self.token_start + self.token_count

    @property
    def layers(self) -> range:
        return range(self.layer_start, self.layer_end)

    def num_bytes(self, spec: KVCacheSpec) -> int:
        return self.token_count * spec.layer_bytes_per_token(self.layer_start, self.layer_end, self.encoding)


@dataclass(frozen=True, slots=True)
class Reservation:
    """The receiver's answer to an offer.

    Attributes:
        num_cached_tokens: number of leading tokens that the receiver already has.
        takes_draft: whether to send the KV of the draft's layers and its state with the model's KV.
        encoding: the offered encoding that parts may use. Native parts are always allowed.
        shares_memory: whether the receiver reads parts from buffers of the sender. Set by the transport.
    """

    num_cached_tokens: int
    takes_draft: bool = False
    encoding: KVEncoding = KVEncoding.NATIVE
    shares_memory: bool = False


class PartPlace(Protocol):
    """The destination of a part, for paths that can write it there without a copy in other memory.

    Attributes:
        views: writable stretches of memory in order. Call :meth:`check` before every write, without awaiting between.
    """

    @property
    def views(self) -> Sequence[memoryview]: ...

    def check(self) -> None:
        """Raises ``TransferError`` when the transfer has ended; the memory may then belong to another request."""
        ...

    async def filled(self, found: int, checksum: int) -> None:
        """Call when the whole part has been written. Returns when there is room for more.

        Args:
            found: checksum of the written bytes.
            checksum: checksum that the sender sent.

        Raises:
            ChecksumError: the checksums differ.
            TransferError: the transfer has ended.
        """
        ...


class KVSink(Protocol):
    """The receiving side. Implementations own the blocks until they are claimed or aborted."""

    async def reserve(self, offer: TransferOffer) -> Reservation:
        """Makes room.

        Raises:
            LayoutMismatchError: sender and receiver have different KV layouts.
            OutOfBlocksError: there was no room before the deadline.
        """
        ...

    async def write(self, transfer_id: str, header: PartHeader, payload: memoryview, checksum: int) -> None:
        """Stores a part. Raises ``ChecksumError`` or ``TransferError``."""
        ...

    def place(self, transfer_id: str, header: PartHeader, num_bytes: int) -> PartPlace | None:
        """The destination of a part of ``num_bytes``; ``None`` when the part must be passed to :meth:`write`.

        Raises:
            TransferError: this part is not due.
        """
        ...

    async def commit(self, transfer_id: str, draft_state: bytes | None = None) -> int:
        """Makes the transfer claimable and returns its size in bytes. Raises ``TransferError`` when parts are missing.

        Args:
            draft_state: see :meth:`baton.engine.draft.network.DraftState.adopt`.
        """
        ...

    def abort(self, transfer_id: str, reason: str) -> None:
        """Frees everything the transfer holds; harmless when the transfer is unknown or has ended."""
        ...


class PartBuffer(Protocol):
    """Memory of a stream for one part. Pass it to ``send``, which takes it over, or release it.

    Attributes:
        view: writable memory of the part's length. Any thread may write into it until ``send`` or ``release``.
        checksum: checksum of what :meth:`fill` copied; ``None`` when the part was written in another way.
    """

    view: memoryview
    checksum: int | None

    def __len__(self) -> int: ...

    def fill(self, views: Sequence[memoryview]) -> None:
        """Copies the whole part from :attr:`Pieces.views`. Raises ValueError when the length differs."""
        ...

    def release(self) -> None:
        """Frees the memory; harmless when repeated."""
        ...


class KVSendStream(Protocol):
    """The sender's side of one transfer. Every method raises ``BatonError`` when the transfer has failed.

    Attributes:
        on_acknowledged: if set, called whenever the receiver has written more, with the total bytes of KV written.
    """

    on_acknowledged: Callable[[int], None] | None

    @property
    def reservation(self) -> Reservation:
        """The receiver's answer."""
        ...

    def buffer(self, num_bytes: int) -> PartBuffer | None:
        """Memory from which the receiver reads a part of ``num_bytes``; ``None`` when none is free."""
        ...

    async def send(self, header: PartHeader, payload: Payload | Pieces | PartBuffer) -> None:
        """Returns once the transport has taken the part. Waits while too many bytes are unacknowledged.

        Args:
            payload: the part; the stream takes over a buffer that came from :meth:`buffer`.
        """
        ...

    async def commit(self, draft_state: bytes | None = None) -> int:
        """Waits for the receiver's acknowledgement. Returns the bytes of KV that the receiver counted."""
        ...

    async def abort(self) -> None:
        """Tells the receiver to forget the transfer. May be called at any time, even after the transfer has ended."""
        ...


class KVTransport(Protocol):
    """Opens transfers to other workers."""

    async def open(self, offer: TransferOffer, peer: str) -> KVSendStream:
        """Asks ``peer`` for room.

        Raises:
            LayoutMismatchError, OutOfBlocksError, TransferError: the transfer cannot begin.
        """
        ...

    async def close(self) -> None:
        """Releases connections. Open transfers end with errors."""
        ...


def plan_parts(
    spec: KVCacheSpec,
    start: int,
    end: int,
    part_bytes: int,
    *,
    with_draft: bool = False,
    encoding: KVEncoding = KVEncoding.NATIVE,
) -> Iterator[PartHeader]:
    """Cuts positions ``[start, end)`` of the model's layers, and of the draft's with ``with_draft``, into parts.

    A part has at most ``part_bytes`` and spans as many layers as fit. If one layer is too large, its tokens are split.
    One token of one layer is never split, even if it exceeds ``part_bytes``.
    """
    num_layers = len(spec.all_layers if with_draft else spec.layers)
    sizes = [spec.layer_bytes_per_token(layer, layer + 1, encoding) for layer in range(num_layers)]
    layer = 0
    while layer < len(sizes) and start < end:
        layer_end, token_bytes = layer + 1, sizes[layer]
        while layer_end < len(sizes) and (end - start) * (token_bytes + sizes[layer_end]) <= part_bytes:
            token_bytes += sizes[layer_end]
            layer_end += 1
        tokens = max(1, min(end - start, part_bytes // token_bytes))
        for token in range(start, end, tokens):
            yield PartHeader(token, min(tokens, end - token), layer, layer_end, encoding)
        layer = layer_end
