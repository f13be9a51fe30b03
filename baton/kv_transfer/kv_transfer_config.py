"""The section ``kv_transfer`` of the configuration: how KV gets from prefill to decode workers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from baton.core.config_section import PositiveSeconds, Section

MOST_CONNECTIONS = 16
"""Upper limit of ``connections`` of one hand-off."""


class KVTransferConfig(Section):
    """The hand-off of KV caches from prefill to decode workers."""

    transport: Literal["grpc", "nixl"] = "grpc"
    """nixl: decode workers read parts from a prefill worker's memory by NIXL, with RDMA where UCX finds it, unless they
    share it (see shared_memory); what cannot be read so travels as with grpc. Both have their control in gRPC."""
    part_bytes: Annotated[int, Field(ge=4096, le=64 * 1024 * 1024)] = 2 * 1024 * 1024
    """Size of one part, and so of one message on the wire where parts travel in messages."""
    shared_memory: Literal["auto", "off"] = "auto"
    """auto: a decode worker that runs on the same host as the same user reads parts from the prefill worker's memory;
    off: none does."""
    connections: Annotated[int, Field(ge=0, le=MOST_CONNECTIONS)] = 4
    """Most TCP connections of one hand-off, beside gRPC, for parts that a decode worker does not read so: one for each
    full 32 MiB of it. Each decode worker listens on a port of its own; parts for one out of reach travel in messages.
    0: all parts do."""
    encoding: Literal["native", "int8", "auto"] = "native"
    """Of KV on its way. native: as it is; int8: LOSSY, half the bytes of bfloat16; auto: LOSSY, int8 where a link is
    measured to be slower than prefill makes KV. Both ends must be set so that int8 may be used."""
    max_bytes_per_second: Annotated[float, Field(gt=0)] | None = None
    """Cap of each worker's outgoing hand-offs together, for links that others use too."""
    reserve_timeout_s: PositiveSeconds = 30.0
    claim_timeout_s: PositiveSeconds = 30.0
    """How long committed KV that nobody claims is kept, and how long a claim waits for a transfer without progress."""
    transfer_timeout_s: PositiveSeconds = 120.0
    """How long a decode worker may keep a hand-off waiting. The time to compute the prompt does not count."""

    @field_validator("connections", mode="before")
    @classmethod
    def _is_a_number(cls, value: object) -> object:
        if isinstance(value, str):  # its neighbours are off by that word
            raise ValueError(f"must be a number from 0, for none, to {MOST_CONNECTIONS}")
        return value
