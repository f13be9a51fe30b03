from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class KVFrame(_message.Message):
    __slots__ = ("reserve", "part", "commit", "alive", "payload")
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    reserve: KVReserve
    part: KVPart
    commit: KVCommit
    alive: KVAlive
    payload: bytes
    def __init__(self, reserve: _Optional[_Union[KVReserve, _Mapping]] = ..., part: _Optional[_Union[KVPart, _Mapping]] = ..., commit: _Optional[_Union[KVCommit, _Mapping]] = ..., alive: _Optional[_Union[KVAlive, _Mapping]] = ..., payload: _Optional[bytes] = ...) -> None: ...

class KVReserve(_message.Message):
    __slots__ = ("transfer_id", "spec_json", "spec_fingerprint", "token_ids", "deadline_s", "segment", "encodings", "connects", "cache_salt")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    SPEC_JSON_FIELD_NUMBER: _ClassVar[int]
    SPEC_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    ENCODINGS_FIELD_NUMBER: _ClassVar[int]
    CONNECTS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    spec_json: str
    spec_fingerprint: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    deadline_s: float
    segment: KVSegment
    encodings: _containers.RepeatedScalarFieldContainer[str]
    connects: bool
    cache_salt: str
    def __init__(self, transfer_id: _Optional[str] = ..., spec_json: _Optional[str] = ..., spec_fingerprint: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., deadline_s: _Optional[float] = ..., segment: _Optional[_Union[KVSegment, _Mapping]] = ..., encodings: _Optional[_Iterable[str]] = ..., connects: _Optional[bool] = ..., cache_salt: _Optional[str] = ...) -> None: ...

class KVSegment(_message.Message):
    __slots__ = ("pid", "fd", "token", "num_slots", "slot_bytes", "nixl")
    PID_FIELD_NUMBER: _ClassVar[int]
    FD_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    NIXL_FIELD_NUMBER: _ClassVar[int]
    pid: int
    fd: int
    token: bytes
    num_slots: int
    slot_bytes: int
    nixl: KVNixl
    def __init__(self, pid: _Optional[int] = ..., fd: _Optional[int] = ..., token: _Optional[bytes] = ..., num_slots: _Optional[int] = ..., slot_bytes: _Optional[int] = ..., nixl: _Optional[_Union[KVNixl, _Mapping]] = ...) -> None: ...

class KVNixl(_message.Message):
    __slots__ = ("agent", "address", "slots_address")
    AGENT_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    agent: bytes
    address: int
    slots_address: int
    def __init__(self, agent: _Optional[bytes] = ..., address: _Optional[int] = ..., slots_address: _Optional[int] = ...) -> None: ...

class KVPart(_message.Message):
    __slots__ = ("token_start", "token_count", "layer_start", "layer_end", "checksum", "slot", "encoding", "num_bytes")
    TOKEN_START_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    LAYER_START_FIELD_NUMBER: _ClassVar[int]
    LAYER_END_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    token_start: int
    token_count: int
    layer_start: int
    layer_end: int
    checksum: int
    slot: KVSlot
    encoding: str
    num_bytes: int
    def __init__(self, token_start: _Optional[int] = ..., token_count: _Optional[int] = ..., layer_start: _Optional[int] = ..., layer_end: _Optional[int] = ..., checksum: _Optional[int] = ..., slot: _Optional[_Union[KVSlot, _Mapping]] = ..., encoding: _Optional[str] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class KVSlot(_message.Message):
    __slots__ = ("index", "generation", "num_bytes")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    index: int
    generation: int
    num_bytes: int
    def __init__(self, index: _Optional[int] = ..., generation: _Optional[int] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class KVCommit(_message.Message):
    __slots__ = ("num_parts", "num_bytes", "draft_state")
    NUM_PARTS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    DRAFT_STATE_FIELD_NUMBER: _ClassVar[int]
    num_parts: int
    num_bytes: int
    draft_state: bytes
    def __init__(self, num_parts: _Optional[int] = ..., num_bytes: _Optional[int] = ..., draft_state: _Optional[bytes] = ...) -> None: ...

class KVAlive(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class KVReply(_message.Message):
    __slots__ = ("reserved", "committed", "received", "failed")
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    reserved: KVReserved
    committed: KVCommitted
    received: KVReceived
    failed: KVFailed
    def __init__(self, reserved: _Optional[_Union[KVReserved, _Mapping]] = ..., committed: _Optional[_Union[KVCommitted, _Mapping]] = ..., received: _Optional[_Union[KVReceived, _Mapping]] = ..., failed: _Optional[_Union[KVFailed, _Mapping]] = ...) -> None: ...

class KVReserved(_message.Message):
    __slots__ = ("num_cached_tokens", "takes_draft", "takes_segment", "encoding", "connection")
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TAKES_DRAFT_FIELD_NUMBER: _ClassVar[int]
    TAKES_SEGMENT_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    CONNECTION_FIELD_NUMBER: _ClassVar[int]
    num_cached_tokens: int
    takes_draft: bool
    takes_segment: bool
    encoding: str
    connection: KVConnection
    def __init__(self, num_cached_tokens: _Optional[int] = ..., takes_draft: _Optional[bool] = ..., takes_segment: _Optional[bool] = ..., encoding: _Optional[str] = ..., connection: _Optional[_Union[KVConnection, _Mapping]] = ...) -> None: ...

class KVConnection(_message.Message):
    __slots__ = ("port", "ticket", "most")
    PORT_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    MOST_FIELD_NUMBER: _ClassVar[int]
    port: int
    ticket: bytes
    most: int
    def __init__(self, port: _Optional[int] = ..., ticket: _Optional[bytes] = ..., most: _Optional[int] = ...) -> None: ...

class KVCommitted(_message.Message):
    __slots__ = ("num_bytes",)
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    num_bytes: int
    def __init__(self, num_bytes: _Optional[int] = ...) -> None: ...

class KVReceived(_message.Message):
    __slots__ = ("num_bytes",)
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    num_bytes: int
    def __init__(self, num_bytes: _Optional[int] = ...) -> None: ...

class KVFailed(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...
