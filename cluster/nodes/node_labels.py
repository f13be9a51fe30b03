"""The label by which machines are reserved for a pool."""

from __future__ import annotations

from enum import StrEnum

from baton.core.roles import DECODE, POOLS, PREFILL

POOL_LABEL = "baton-pool"
"""A node with this label runs workers of that pool only; a node without it runs those of all pools."""


class NodePool(StrEnum):
    """The workers that a machine runs."""

    PREFILL = PREFILL
    DECODE = DECODE
    ANY = "any"
    NONE = "none"

    @property
    def labels(self) -> dict[str, str]:
        """The labels of the machine's node."""
        return {} if self is NodePool.ANY else {POOL_LABEL: str(self)}


def selector_of(pool: str) -> str:
    """Selects the nodes that are not reserved for something else, in Ray's syntax."""
    return f"!in({','.join([*(other for other in POOLS if other != pool), NodePool.NONE])})"
