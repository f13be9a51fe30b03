"""The contracts of hand-offs. A transfer is: reserve → push missing parts → commit → acknowledge."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.core.kv_spec import KVCacheSpec, KVEncoding

Payload = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Pieces:
    """A payload where it lies: stretches of a cache in their order. They do not change until they have been sent."""

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
        encodings: encodings that the sender would use, the best one first. The native one is always possible.
    """

    transfer_id: str
    request_id: str
    spec: KVCacheSpec
    token_ids: tuple[int, ...]
    deadline_s: float
    encodings: tuple[KVEncoding, ...] = ()


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
        num_cached_tokens: leading tokens that need not travel.
        takes_draft: whether the KV of the draft's layers, and its state, should travel with the model's.
        encoding: the offered encoding that parts may have. Native parts are always possible.
        shares_memory: whether the receiver reads parts from buffers of the sender. Set by the transport.
    """

    num_cached_tokens: int
    takes_draft: bool = False
    encoding: KVEncoding = KVEncoding.NATIVE
    shares_memory: bool = False


class PartPlace(Protocol):
    """Where a part belongs, for paths that can write it there without holding it in other memory first.

    Attributes:
        views: writable stretches, in their order. Call :meth:`check` before every write, with no pause between.
    """

    @property
    def views(self) -> Sequence[memoryview]: ...

    def check(self) -> None:
        """Raises ``TransferError`` when the transfer has ended, and the place may belong to another request."""
        ...

    async def filled(self, found: int, checksum: int) -> None:
        """Ends the write of the whole part. Returns when there is room for more.

        Args:
            found: checksum of what was written.
            checksum: checksum that the sender sent.

        Raises:
            ChecksumError: the two differ.
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
        """Where a part of ``num_bytes`` belongs; ``None`` when it must be given to :meth:`write`.

        Raises:
            TransferError: such a part is not due.
        """
        ...

    async def commit(self, transfer_id: str, draft_state: bytes | None = None) -> int:
        """Makes the transfer claimable and returns its bytes. Raises ``TransferError`` when parts are missing.

        Args:
            draft_state: see :meth:`baton.engine.draft.network.DraftState.adopt`.
        """
        ...

    def abort(self, transfer_id: str, reason: str) -> None:
        """Gives everything back; harmless when the transfer is unknown or has ended."""
        ...


class PartBuffer(Protocol):
    """Memory of a stream for one part. Give it to ``send``, which keeps it, or release it.

    Attributes:
        view: writable, as long as the part. Any thread may write into it until ``send`` or ``release``.
        checksum: of what :meth:`fill` has copied; ``None`` when the part was written in another way.
    """

    view: memoryview
    checksum: int | None

    def __len__(self) -> int: ...

    def fill(self, views: Sequence[memoryview]) -> None:
        """Copies the whole part from where it lies, see :attr:`Pieces.views`. Raises ValueError for another length."""
        ...

    def release(self) -> None:
        """Gives the memory back; harmless when repeated."""
        ...


class KVSendStream(Protocol):
    """One transfer, from the sender's side. Every method raises ``BatonError`` when the transfer broke.

    Attributes:
        on_acknowledged: if set, called with the bytes of KV that the receiver has written, whenever that grows.
    """

    on_acknowledged: Callable[[int], None] | None

    @property
    def reservation(self) -> Reservation:
        """The receiver's answer."""
        ...

    def buffer(self, num_bytes: int) -> PartBuffer | None:
        """Memory from which the receiver itself reads a part of ``num_bytes``; ``None`` when there is none free."""
        ...

    async def send(self, header: PartHeader, payload: Payload | Pieces | PartBuffer) -> None:
        """Returns once the transport has taken the part. Waits while too much is on its way to a slow receiver.

        Args:
            payload: a buffer of this stream belongs to the stream from the call on.
        """
        ...

    async def commit(self, draft_state: bytes | None = None) -> int:
        """Waits for the receiver's acknowledgement. Returns the bytes of KV that the receiver counted."""
        ...

    async def abort(self) -> None:
        """Tells the receiver to forget the transfer. Possible at any time, also after the end."""
        ...


class KVTransport(Protocol):
    """Opens transfers to other workers."""

    async def open(self, offer: TransferOffer, peer: str) -> KVSendStream:
        """Asks ``peer`` for room.

        Raises:
            LayoutMismatchError, OutOfBlocksError, TransferError: no part will travel.
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
    """Cuts positions ``[start, end)`` of the model's layers, and of the draft's if wanted, into parts.

    A part has at most ``part_bytes``. It spans as many layers as fit. Where one layer alone is too large, its tokens
    are split. One token of one layer is never split, however small ``part_bytes`` is.
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
