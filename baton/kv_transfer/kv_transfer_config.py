"""The section ``kv_transfer`` of the configuration: how KV is sent from prefill to decode workers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from baton.core.config_section import PositiveSeconds, Section

MAX_CONNECTIONS = 16
"""Upper limit of ``connections``."""


class KVTransferConfig(Section):
    """The hand-off of KV caches from prefill to decode workers."""

    transport: Literal["grpc", "nixl"] = "grpc"
    """nixl: decode workers read parts from a prefill worker's memory through NIXL, with RDMA where UCX supports it,
    unless they share memory (see shared_memory); parts that cannot be read are sent as with grpc. Control messages
    always use gRPC."""
    part_bytes: Annotated[int, Field(ge=4096, le=64 * 1024 * 1024)] = 2 * 1024 * 1024
    """Size of one part, and of one message where parts are sent in messages."""
    shared_memory: Literal["auto", "off"] = "auto"
    """auto: a decode worker on the same host, run by the same user, reads parts from the prefill worker's memory; off:
    no memory is shared."""
    connections: Annotated[int, Field(ge=0, le=MAX_CONNECTIONS)] = 4
    """Maximum number of TCP connections of one hand-off, beside gRPC, for parts that are not read from memory: one per
    full 32 MiB of the hand-off. Each decode worker listens on its own port. Parts for an unreachable port, and all
    parts with 0, are sent in messages."""
    encoding: Literal["native", "int8", "auto"] = "native"
    """Encoding of KV in transit. native: unchanged; int8: LOSSY, half the bytes of bfloat16; auto: LOSSY, int8 where a
    link is measured to be slower than prefill produces KV. int8 is used only if the settings of both ends allow it."""
    max_bytes_per_second: Annotated[float, Field(gt=0)] | None = None
    """Cap of each worker's outgoing hand-offs together, for shared links."""
    reserve_timeout_s: PositiveSeconds = 30.0
    claim_timeout_s: PositiveSeconds = 30.0
    """How long unclaimed committed KV is kept, and how long a claim waits for a transfer without progress."""
    transfer_timeout_s: PositiveSeconds = 120.0
    """How long a decode worker may keep a hand-off waiting; the time to compute the prompt does not count."""

    @field_validator("connections", mode="before")
    @classmethod
    def _is_a_number(cls, value: object) -> object:
        if isinstance(value, str):  # neighbouring settings accept "off", this one does not
            raise ValueError(f"must be a number from 0 (none) to {MAX_CONNECTIONS}")
        return value
