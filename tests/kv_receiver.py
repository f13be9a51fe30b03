"""The receiving part of a decode worker, and KV to send to it, for tests of the hand-off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import asynccontextmanager

import torch

from baton.core.chunk_budget import SchedulerLimits
from baton.core.kv_spec import KVCacheSpec, KVEncoding
from baton.engine.async_engine import AsyncEngine
from baton.engine.kv_cache.paged_cache import PagedKVCache
from baton.engine.runner.model_runner import ModelRunner
from baton.kv_transfer.base import PartHeader, TransferOffer, plan_parts
from decode_worker.kv_import import Import, KVImporter
from decode_worker.speculation.verification import SampleAndMatch
from tests.tiny_models import random_prompts

NUM_BLOCKS = 32
PROMPT = random_prompts((22,))[0]
CLAIM_TIMEOUT_S = 60.0


class Receiver:
    """A running engine and its importer."""

    def __init__(self, engine: AsyncEngine, importer: KVImporter) -> None:
        self.engine = engine
        self.importer = importer

    @property
    def spec(self) -> KVCacheSpec:
        return self.engine.runner.spec

    async def num_used_blocks(self) -> int:
        return (await self.engine.call(self.engine.blocks.usage)).used

    async def take_blocks(self, count: int) -> list[int]:
        """Allocates blocks, so that less room is left."""
        return await self.engine.call(lambda: self.engine.blocks.pool.allocate(count))

    async def give_back(self, blocks: list[int]) -> None:
        await self.engine.call(lambda: self.engine.blocks.pool.release(blocks))
        self.engine.notify_freed()

    async def all_given_back(self, timeout_s: float = 30.0) -> None:
        """Waits until no blocks are held and no transfers exist; fails with the problems left after ``timeout_s``.

        Usage and references are checked together: a transfer that is just being aborted may take blocks that were freed
        a moment ago, and returns them soon.
        """

        def wrong() -> list[str]:
            blocks = self.engine.blocks
            used = blocks.usage().used
            return ([f"{used} blocks in use"] if used else []) + blocks.pool.check([])

        problems: list[str] = []
        try:
            async with asyncio.timeout(timeout_s):
                while (problems := await self.engine.call(wrong)) or self.importer.num_active:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
        except TimeoutError:
            raise AssertionError(f"{problems}, {self.importer.num_active} transfers alive") from None

    async def read(self, imported: Import) -> list[bytes]:
        """The cache's content of a claimed transfer, layer by layer."""
        holder = imported.holder
        assert holder is not None
        return read_layers(self.engine.runner.cache, holder.block_ids, holder.num_tokens)


@asynccontextmanager
async def running_receiver(
    runner: ModelRunner,
    *,
    claim_timeout_s: float = CLAIM_TIMEOUT_S,
    prefix_caching: bool = True,
    encodings: Collection[KVEncoding] = (),
) -> AsyncIterator[Receiver]:
    """A receiver with an empty cache."""
    for tensor in (*runner.cache.keys, *runner.cache.values):
        tensor.fill_(torch.nan)
    limits = SchedulerLimits(64, 16, runner.loaded.max_model_len)
    engine = AsyncEngine(runner, limits, prefix_caching=prefix_caching, verifier=SampleAndMatch(), num_threads=1)
    importer = KVImporter(engine, claim_timeout_s, encodings=encodings)
    engine.start()
    try:
        yield Receiver(engine, importer)
    finally:
        await engine.stop()


class SourceKV:
    """Random KV of one prompt, as a prefill worker would hold it."""

    def __init__(self, spec: KVCacheSpec, token_ids: Sequence[int], seed: int = 0) -> None:
        self.spec = spec
        self.token_ids = list(token_ids)
        num_blocks = -(-len(token_ids) // spec.block_size)
        self._cache = PagedKVCache(spec, max(1, num_blocks), torch.device("cpu"))
        self._block_ids = list(range(num_blocks))
        generator = torch.Generator().manual_seed(seed)
        for tensor in (*self._cache.keys, *self._cache.values):
            tensor.copy_(torch.randn(tensor.shape, generator=generator))

    @property
    def layers(self) -> list[bytes]:
        return read_layers(self._cache, self._block_ids, len(self.token_ids))

    def offer(
        self, transfer_id: str = "transfer-1", deadline_s: float = 2.0, encodings: tuple[KVEncoding, ...] = ()
    ) -> TransferOffer:
        return TransferOffer(transfer_id, self.spec, tuple(self.token_ids), deadline_s, encodings)

    def payload(self, header: PartHeader) -> bytearray:
        span = (header.token_start, header.token_end)
        return self._cache.export_bytes(self._block_ids, *span, header.layers, encoding=header.encoding)

    def parts(
        self, start: int = 0, part_bytes: int = 700, encoding: KVEncoding = KVEncoding.NATIVE
    ) -> Iterator[tuple[PartHeader, bytearray]]:
        for header in plan_parts(self.spec, start, len(self.token_ids), part_bytes, encoding=encoding):
            yield header, self.payload(header)

    def pass_through(self, encoding: KVEncoding) -> None:
        """Rounds the KV as this encoding would."""
        self._cache.pass_through(self._block_ids, len(self.token_ids), encoding)


def read_layers(cache: PagedKVCache, block_ids: Sequence[int], num_tokens: int) -> list[bytes]:
    return [
        bytes(cache.export_bytes(block_ids, 0, num_tokens, range(layer, layer + 1)))
        for layer in range(len(cache.spec.layers))
    ]
