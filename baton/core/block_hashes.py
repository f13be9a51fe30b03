"""Content hashes of KV blocks; the prefix caches of all workers use them as keys. No torch here.

A cluster keys its hashes, so that a hash reveals nothing about a prompt to anyone without the key. Sequences with
different salts have different hashes, so they never share cached blocks.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

HASH_BYTES = 16
_TOKEN_BYTES = array("q").itemsize


def hash_blocks(
    token_ids: Sequence[int],
    block_size: int,
    num_blocks: int,
    parent: bytes | None = None,
    *,
    salt: str = "",
    key: bytes = b"",
) -> list[bytes]:
    """Returns the 16-byte content hashes of ``num_blocks`` full blocks, each chained to the one before.

    Args:
        token_ids: tokens of the sequence, from the first of these blocks on.
        parent: hash of the block before the first; ``None`` at the start of a sequence.
        salt: separates sequences that must not share blocks; only the start of a sequence needs it.
        key: secret of at most 64 bytes; empty where no hash leaves the process.
    """
    tokens = memoryview(array("q", token_ids[: num_blocks * block_size])).cast("B")
    num_bytes = block_size * _TOKEN_BYTES
    hashes: list[bytes] = []
    newest = parent or hashlib.blake2b(salt.encode(), key=key, digest_size=HASH_BYTES).digest()
    for start in range(0, num_blocks * num_bytes, num_bytes):
        digest = hashlib.blake2b(newest, key=key, digest_size=HASH_BYTES)
        digest.update(tokens[start : start + num_bytes])
        newest = digest.digest()
        hashes.append(newest)
    return hashes
