"""What prefix affinity costs, on workers and in the router: ``python -m benchmarks.prefix_lookup [--help]``.

No model and no network: a prefix cache whose events are read, and an index that many workers have told of theirs. Each
of them holds a part of one prompt, drawn at random, and one holds all of it. Medians; the machine should do nothing
else.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
import tracemalloc
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from baton.core.block_hashes import HASH_BYTES
from baton.core.prefix_events import CacheChanges, PrefixEvents
from baton.rpc.cache_messages import pack_cache_changes
from cluster.prefix_index.prefix_index import PrefixIndex
from cluster.prefix_index.prompt_hashes import prompt_hashes

_STEP_BLOCKS = 32  # 512 prompt tokens in blocks of 16


@dataclass(frozen=True, slots=True)
class Setting:
    """How large everything is."""

    num_workers: int
    prompt_tokens: int
    block_size: int
    blocks_per_worker: int
    repeats: int
    seed: int = 0


def median_us(run: Callable[[], object], repeats: int) -> float:
    """Microseconds of a call."""
    times = []
    for _ in range(repeats + 1):
        started_s = time.perf_counter()
        run()
        times.append((time.perf_counter() - started_s) * 1e6)
    return statistics.median(times[1:])


def fill_index(setting: Setting, prompt: Sequence[int]) -> PrefixIndex:
    """An index that knows of full caches."""
    generator = random.Random(setting.seed)
    index, blocks = PrefixIndex(setting.block_size), prompt_hashes(prompt, setting.block_size).blocks
    for number in range(setting.num_workers):
        held = blocks[: generator.randint(0, len(blocks)) if number else len(blocks)]
        others = (generator.randbytes(HASH_BYTES) for _ in range(max(0, setting.blocks_per_worker - len(held))))
        for message in pack_cache_changes(CacheChanges((*held, *others), is_snapshot=True)):
            index.apply(f"worker-{number}", message)
    return index


def measure_router(setting: Setting) -> dict[str, float]:
    """Microseconds by what takes them; the last is bytes."""
    generator = random.Random(setting.seed + 1)
    prompt = tuple(generator.randrange(150_000) for _ in range(setting.prompt_tokens))
    fresh = tuple(generator.randrange(150_000) for _ in range(setting.prompt_tokens))
    tracemalloc.start()
    index = fill_index(setting, prompt)
    num_known = sum(index.sizes().values())
    memory = tracemalloc.get_traced_memory()[0] / num_known
    tracemalloc.stop()
    names, hashes, unknown = list(index.sizes()), index.hashes(prompt), index.hashes(fresh)
    batch = tuple(generator.randbytes(HASH_BYTES) for _ in range(_STEP_BLOCKS))
    (stored,), (evicted,) = pack_cache_changes(CacheChanges(batch)), pack_cache_changes(CacheChanges((), batch))

    def take() -> None:
        index.apply(names[0], stored)
        index.apply(names[0], evicted)

    return {
        "hash the prompt, once a request": median_us(
            lambda: prompt_hashes(prompt, setting.block_size), setting.repeats
        ),
        "look it up, a worker holds all of it": median_us(lambda: index.cached_tokens(names, hashes), setting.repeats),
        "look up one that nobody holds": median_us(lambda: index.cached_tokens(names, unknown), setting.repeats),
        "expect it on a worker, and not any more": median_us(
            lambda: index.expect(names[0], unknown, time.monotonic() + 1e-9), setting.repeats
        ),
        f"take {_STEP_BLOCKS} blocks stored and {_STEP_BLOCKS} evicted": median_us(take, setting.repeats),
        "bytes of memory for a known block": memory,
    }


def measure_worker(setting: Setting, num_readers: int) -> float:
    """Microseconds that the events of a step take which stores some blocks and evicts as many from a full cache."""
    generator = random.Random(setting.seed)
    events, content = PrefixEvents(), deque(generator.randbytes(HASH_BYTES) for _ in range(setting.blocks_per_worker))
    for block_hash in content:
        events.stored(block_hash)
    times = []
    with ExitStack() as stack:
        readers = [stack.enter_context(events.reader(lambda: None)) for _ in range(num_readers)]
        for _ in range(setting.repeats):
            for reader in readers:
                reader.take()
            fresh = [generator.randbytes(HASH_BYTES) for _ in range(_STEP_BLOCKS)]
            started_s = time.perf_counter()
            for block_hash in fresh:
                events.evicted(content.popleft())
                events.stored(block_hash)
            times.append((time.perf_counter() - started_s) * 1e6)
            content.extend(fresh)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=12_000)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--blocks", type=int, default=4096, help="in the cache of each worker")
    parser.add_argument("--repeats", type=int, default=200)
    arguments = parser.parse_args()
    setting = Setting(
        arguments.workers, arguments.prompt_tokens, arguments.block_size, arguments.blocks, arguments.repeats
    )
    table = Table("where", "what", "µs")
    for readers, whose in ((0, "nobody reads"), (1, "one router reads")):
        what = f"a step's events, {_STEP_BLOCKS} blocks stored and {_STEP_BLOCKS} evicted; {whose}"
        table.add_row("worker", what, f"{measure_worker(setting, readers):.1f}")
    for what, value in measure_router(setting).items():
        table.add_row("router", what, f"{value:.1f}")
    console = Console()
    console.print(
        f"{setting.num_workers} workers with {setting.blocks_per_worker} blocks of {setting.block_size} tokens, "
        f"a prompt of {setting.prompt_tokens} tokens"
    )
    console.print(table)


if __name__ == "__main__":
    main()
