from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SamplingParams(_message.Message):
    __slots__ = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "stop_token_ids", "ignore_eos", "min_tokens", "logprobs", "seed", "grammar", "prompt_logprobs")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    min_tokens: int
    logprobs: int
    seed: int
    grammar: str
    prompt_logprobs: int
    def __init__(self, max_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., min_tokens: _Optional[int] = ..., logprobs: _Optional[int] = ..., seed: _Optional[int] = ..., grammar: _Optional[str] = ..., prompt_logprobs: _Optional[int] = ...) -> None: ...

class Sequence(_message.Message):
    __slots__ = ("request_id", "prompt_token_ids", "output_token_ids", "params", "speculation_method", "queue_priority", "tpot_target_s", "cache_salt", "is_traced")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_METHOD_FIELD_NUMBER: _ClassVar[int]
    QUEUE_PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TPOT_TARGET_S_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    IS_TRACED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    output_token_ids: _containers.RepeatedScalarFieldContainer[int]
    params: SamplingParams
    speculation_method: str
    queue_priority: QueuePriority
    tpot_target_s: float
    cache_salt: str
    is_traced: bool
    def __init__(self, request_id: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., output_token_ids: _Optional[_Iterable[int]] = ..., params: _Optional[_Union[SamplingParams, _Mapping]] = ..., speculation_method: _Optional[str] = ..., queue_priority: _Optional[_Union[QueuePriority, _Mapping]] = ..., tpot_target_s: _Optional[float] = ..., cache_salt: _Optional[str] = ..., is_traced: _Optional[bool] = ...) -> None: ...

class QueuePriority(_message.Message):
    __slots__ = ("priority", "due_in_s", "patience_s")
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    DUE_IN_S_FIELD_NUMBER: _ClassVar[int]
    PATIENCE_S_FIELD_NUMBER: _ClassVar[int]
    priority: int
    due_in_s: float
    patience_s: float
    def __init__(self, priority: _Optional[int] = ..., due_in_s: _Optional[float] = ..., patience_s: _Optional[float] = ...) -> None: ...

class Handoff(_message.Message):
    __slots__ = ("transfer_id", "peer", "peer_proof")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    PEER_PROOF_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    peer: str
    peer_proof: str
    def __init__(self, transfer_id: _Optional[str] = ..., peer: _Optional[str] = ..., peer_proof: _Optional[str] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("sequence", "handoff")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    sequence: Sequence
    handoff: Handoff
    def __init__(self, sequence: _Optional[_Union[Sequence, _Mapping]] = ..., handoff: _Optional[_Union[Handoff, _Mapping]] = ...) -> None: ...

class Logprob(_message.Message):
    __slots__ = ("token_id", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "top")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[Logprob]
    def __init__(self, logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[Logprob, _Mapping]]] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("start", "logprobs", "ranks", "top_ids", "top_logprobs")
    START_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    start: int
    logprobs: bytes
    ranks: bytes
    top_ids: bytes
    top_logprobs: bytes
    def __init__(self, start: _Optional[int] = ..., logprobs: _Optional[bytes] = ..., ranks: _Optional[bytes] = ..., top_ids: _Optional[bytes] = ..., top_logprobs: _Optional[bytes] = ...) -> None: ...

class TimedEvent(_message.Message):
    __slots__ = ("name", "at_s")
    NAME_FIELD_NUMBER: _ClassVar[int]
    AT_S_FIELD_NUMBER: _ClassVar[int]
    name: str
    at_s: float
    def __init__(self, name: _Optional[str] = ..., at_s: _Optional[float] = ...) -> None: ...

class EngineStep(_message.Message):
    __slots__ = ("index", "started_s", "ended_s", "busy_s", "draft_s", "num_steps", "num_computed_tokens", "num_sequences", "num_batch_tokens", "num_prompt_tokens")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    STARTED_S_FIELD_NUMBER: _ClassVar[int]
    ENDED_S_FIELD_NUMBER: _ClassVar[int]
    BUSY_S_FIELD_NUMBER: _ClassVar[int]
    DRAFT_S_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NUM_BATCH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    index: int
    started_s: float
    ended_s: float
    busy_s: float
    draft_s: float
    num_steps: int
    num_computed_tokens: int
    num_sequences: int
    num_batch_tokens: int
    num_prompt_tokens: int
    def __init__(self, index: _Optional[int] = ..., started_s: _Optional[float] = ..., ended_s: _Optional[float] = ..., busy_s: _Optional[float] = ..., draft_s: _Optional[float] = ..., num_steps: _Optional[int] = ..., num_computed_tokens: _Optional[int] = ..., num_sequences: _Optional[int] = ..., num_batch_tokens: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ...) -> None: ...

class TransferPart(_message.Message):
    __slots__ = ("num_bytes", "num_parts", "started_s", "sent_s", "acknowledged_s")
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_PARTS_FIELD_NUMBER: _ClassVar[int]
    STARTED_S_FIELD_NUMBER: _ClassVar[int]
    SENT_S_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_S_FIELD_NUMBER: _ClassVar[int]
    num_bytes: int
    num_parts: int
    started_s: float
    sent_s: float
    acknowledged_s: float
    def __init__(self, num_bytes: _Optional[int] = ..., num_parts: _Optional[int] = ..., started_s: _Optional[float] = ..., sent_s: _Optional[float] = ..., acknowledged_s: _Optional[float] = ...) -> None: ...

class PrefillEvent(_message.Message):
    __slots__ = ("first_token", "handoff", "prompt_logprobs", "events")
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    first_token: TokenBatch
    handoff: HandoffResult
    prompt_logprobs: PromptLogprobs
    events: _containers.RepeatedCompositeFieldContainer[TimedEvent]
    def __init__(self, first_token: _Optional[_Union[TokenBatch, _Mapping]] = ..., handoff: _Optional[_Union[HandoffResult, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ..., events: _Optional[_Iterable[_Union[TimedEvent, _Mapping]]] = ...) -> None: ...

class HandoffResult(_message.Message):
    __slots__ = ("num_bytes", "num_parts", "num_tokens", "num_cached_tokens", "seconds", "error_code", "error_message", "parts", "num_shared_bytes", "num_spared_bytes")
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_PARTS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    ERROR_CODE_FIELD_NUMBER: _ClassVar[int]
    ERROR_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARED_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_SPARED_BYTES_FIELD_NUMBER: _ClassVar[int]
    num_bytes: int
    num_parts: int
    num_tokens: int
    num_cached_tokens: int
    seconds: float
    error_code: str
    error_message: str
    parts: _containers.RepeatedCompositeFieldContainer[TransferPart]
    num_shared_bytes: int
    num_spared_bytes: int
    def __init__(self, num_bytes: _Optional[int] = ..., num_parts: _Optional[int] = ..., num_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., seconds: _Optional[float] = ..., error_code: _Optional[str] = ..., error_message: _Optional[str] = ..., parts: _Optional[_Iterable[_Union[TransferPart, _Mapping]]] = ..., num_shared_bytes: _Optional[int] = ..., num_spared_bytes: _Optional[int] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("sequence", "transfer_id")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    sequence: Sequence
    transfer_id: str
    def __init__(self, sequence: _Optional[_Union[Sequence, _Mapping]] = ..., transfer_id: _Optional[str] = ...) -> None: ...

class AbandonRequest(_message.Message):
    __slots__ = ("transfer_id",)
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    def __init__(self, transfer_id: _Optional[str] = ...) -> None: ...

class AbandonReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TokenBatch(_message.Message):
    __slots__ = ("token_ids", "logprobs", "finish_reason", "num_cached_tokens", "events", "num_drafted", "num_accepted", "steps", "drafted_by", "prompt_logprobs", "round")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTED_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_BY_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    finish_reason: str
    num_cached_tokens: int
    events: _containers.RepeatedCompositeFieldContainer[TimedEvent]
    num_drafted: int
    num_accepted: int
    steps: _containers.RepeatedCompositeFieldContainer[EngineStep]
    drafted_by: str
    prompt_logprobs: PromptLogprobs
    round: Round
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., finish_reason: _Optional[str] = ..., num_cached_tokens: _Optional[int] = ..., events: _Optional[_Iterable[_Union[TimedEvent, _Mapping]]] = ..., num_drafted: _Optional[int] = ..., num_accepted: _Optional[int] = ..., steps: _Optional[_Iterable[_Union[EngineStep, _Mapping]]] = ..., drafted_by: _Optional[str] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ..., round: _Optional[_Union[Round, _Mapping]] = ...) -> None: ...

class Round(_message.Message):
    __slots__ = ("draft", "parents", "accepted", "draft_s", "verify_s", "num_sequences")
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    DRAFT_S_FIELD_NUMBER: _ClassVar[int]
    VERIFY_S_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    draft: _containers.RepeatedScalarFieldContainer[int]
    parents: _containers.RepeatedScalarFieldContainer[int]
    accepted: _containers.RepeatedScalarFieldContainer[int]
    draft_s: float
    verify_s: float
    num_sequences: int
    def __init__(self, draft: _Optional[_Iterable[int]] = ..., parents: _Optional[_Iterable[int]] = ..., accepted: _Optional[_Iterable[int]] = ..., draft_s: _Optional[float] = ..., verify_s: _Optional[float] = ..., num_sequences: _Optional[int] = ...) -> None: ...

class PingRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PingReply(_message.Message):
    __slots__ = ("monotonic_s", "num_steps", "step_age_s", "expected_step_s")
    MONOTONIC_S_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    STEP_AGE_S_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_STEP_S_FIELD_NUMBER: _ClassVar[int]
    monotonic_s: float
    num_steps: int
    step_age_s: float
    expected_step_s: float
    def __init__(self, monotonic_s: _Optional[float] = ..., num_steps: _Optional[int] = ..., step_age_s: _Optional[float] = ..., expected_step_s: _Optional[float] = ...) -> None: ...

class ProbeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ProbeReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CacheEvents(_message.Message):
    __slots__ = ("is_snapshot", "stored", "evicted")
    IS_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    is_snapshot: bool
    stored: bytes
    evicted: bytes
    def __init__(self, is_snapshot: _Optional[bool] = ..., stored: _Optional[bytes] = ..., evicted: _Optional[bytes] = ...) -> None: ...

class Booking(_message.Message):
    __slots__ = ("router", "name", "uncached_tokens", "cached_tokens", "queue_priority", "decode_worker", "num_tokens", "expected_tokens", "tpot_target_s")
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    UNCACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_PRIORITY_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TPOT_TARGET_S_FIELD_NUMBER: _ClassVar[int]
    router: str
    name: str
    uncached_tokens: int
    cached_tokens: int
    queue_priority: QueuePriority
    decode_worker: str
    num_tokens: int
    expected_tokens: int
    tpot_target_s: float
    def __init__(self, router: _Optional[str] = ..., name: _Optional[str] = ..., uncached_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., queue_priority: _Optional[_Union[QueuePriority, _Mapping]] = ..., decode_worker: _Optional[str] = ..., num_tokens: _Optional[int] = ..., expected_tokens: _Optional[int] = ..., tpot_target_s: _Optional[float] = ...) -> None: ...

class OpenBooking(_message.Message):
    __slots__ = ("booking", "age_s", "is_computed", "num_new_tokens")
    BOOKING_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    IS_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    NUM_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    booking: Booking
    age_s: float
    is_computed: bool
    num_new_tokens: int
    def __init__(self, booking: _Optional[_Union[Booking, _Mapping]] = ..., age_s: _Optional[float] = ..., is_computed: _Optional[bool] = ..., num_new_tokens: _Optional[int] = ...) -> None: ...

class WatchBookingsRequest(_message.Message):
    __slots__ = ("router",)
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    router: str
    def __init__(self, router: _Optional[str] = ...) -> None: ...

class BookingEvents(_message.Message):
    __slots__ = ("is_snapshot", "open", "ended")
    IS_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    is_snapshot: bool
    open: _containers.RepeatedCompositeFieldContainer[OpenBooking]
    ended: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, is_snapshot: _Optional[bool] = ..., open: _Optional[_Iterable[_Union[OpenBooking, _Mapping]]] = ..., ended: _Optional[_Iterable[str]] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StepCosts(_message.Message):
    __slots__ = ("coefficients", "sd", "num_samples", "rates")
    COEFFICIENTS_FIELD_NUMBER: _ClassVar[int]
    SD_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    RATES_FIELD_NUMBER: _ClassVar[int]
    coefficients: _containers.RepeatedScalarFieldContainer[float]
    sd: float
    num_samples: int
    rates: _containers.RepeatedCompositeFieldContainer[SpeculationRate]
    def __init__(self, coefficients: _Optional[_Iterable[float]] = ..., sd: _Optional[float] = ..., num_samples: _Optional[int] = ..., rates: _Optional[_Iterable[_Union[SpeculationRate, _Mapping]]] = ...) -> None: ...

class SpeculationRate(_message.Message):
    __slots__ = ("size_class", "decoding", "emitted", "drafted")
    SIZE_CLASS_FIELD_NUMBER: _ClassVar[int]
    DECODING_FIELD_NUMBER: _ClassVar[int]
    EMITTED_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    size_class: int
    decoding: float
    emitted: float
    drafted: float
    def __init__(self, size_class: _Optional[int] = ..., decoding: _Optional[float] = ..., emitted: _Optional[float] = ..., drafted: _Optional[float] = ...) -> None: ...

class WorkerStats(_message.Message):
    __slots__ = ("worker_id", "role", "num_running", "num_waiting", "num_transfers", "kv_blocks_total", "kv_blocks_used", "kv_blocks_cached", "num_leaked_blocks", "num_preemptions", "num_steps", "prefill_tokens", "generated_tokens", "kv_bytes_sent", "kv_bytes_received", "uptime_s", "num_draft_failures", "methods", "step_costs", "speculation")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_USED_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_CACHED_FIELD_NUMBER: _ClassVar[int]
    NUM_LEAKED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_FAILURES_FIELD_NUMBER: _ClassVar[int]
    METHODS_FIELD_NUMBER: _ClassVar[int]
    STEP_COSTS_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: str
    num_running: int
    num_waiting: int
    num_transfers: int
    kv_blocks_total: int
    kv_blocks_used: int
    kv_blocks_cached: int
    num_leaked_blocks: int
    num_preemptions: int
    num_steps: int
    prefill_tokens: int
    generated_tokens: int
    kv_bytes_sent: int
    kv_bytes_received: int
    uptime_s: float
    num_draft_failures: int
    methods: _containers.RepeatedCompositeFieldContainer[MethodStats]
    step_costs: StepCosts
    speculation: SpeculationState
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[str] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_transfers: _Optional[int] = ..., kv_blocks_total: _Optional[int] = ..., kv_blocks_used: _Optional[int] = ..., kv_blocks_cached: _Optional[int] = ..., num_leaked_blocks: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., num_steps: _Optional[int] = ..., prefill_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., kv_bytes_sent: _Optional[int] = ..., kv_bytes_received: _Optional[int] = ..., uptime_s: _Optional[float] = ..., num_draft_failures: _Optional[int] = ..., methods: _Optional[_Iterable[_Union[MethodStats, _Mapping]]] = ..., step_costs: _Optional[_Union[StepCosts, _Mapping]] = ..., speculation: _Optional[_Union[SpeculationState, _Mapping]] = ...) -> None: ...

class SpeculationState(_message.Message):
    __slots__ = ("default_method", "draft_share", "num_without_draft", "tokens_per_sequence")
    DEFAULT_METHOD_FIELD_NUMBER: _ClassVar[int]
    DRAFT_SHARE_FIELD_NUMBER: _ClassVar[int]
    NUM_WITHOUT_DRAFT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    default_method: str
    draft_share: float
    num_without_draft: int
    tokens_per_sequence: float
    def __init__(self, default_method: _Optional[str] = ..., draft_share: _Optional[float] = ..., num_without_draft: _Optional[int] = ..., tokens_per_sequence: _Optional[float] = ...) -> None: ...

class MethodStats(_message.Message):
    __slots__ = ("method", "num_drafts", "num_drafted_tokens", "num_accepted_tokens", "reached", "accepted", "recent_acceptance", "costs", "chosen_lengths", "recent_length", "is_shadow", "kinds")
    METHOD_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REACHED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    RECENT_ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    COSTS_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    RECENT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    IS_SHADOW_FIELD_NUMBER: _ClassVar[int]
    KINDS_FIELD_NUMBER: _ClassVar[int]
    method: str
    num_drafts: int
    num_drafted_tokens: int
    num_accepted_tokens: int
    reached: _containers.RepeatedScalarFieldContainer[int]
    accepted: _containers.RepeatedScalarFieldContainer[int]
    recent_acceptance: _containers.RepeatedScalarFieldContainer[float]
    costs: _containers.RepeatedCompositeFieldContainer[DraftCost]
    chosen_lengths: _containers.RepeatedScalarFieldContainer[int]
    recent_length: float
    is_shadow: bool
    kinds: _containers.RepeatedCompositeFieldContainer[DraftKind]
    def __init__(self, method: _Optional[str] = ..., num_drafts: _Optional[int] = ..., num_drafted_tokens: _Optional[int] = ..., num_accepted_tokens: _Optional[int] = ..., reached: _Optional[_Iterable[int]] = ..., accepted: _Optional[_Iterable[int]] = ..., recent_acceptance: _Optional[_Iterable[float]] = ..., costs: _Optional[_Iterable[_Union[DraftCost, _Mapping]]] = ..., chosen_lengths: _Optional[_Iterable[int]] = ..., recent_length: _Optional[float] = ..., is_shadow: _Optional[bool] = ..., kinds: _Optional[_Iterable[_Union[DraftKind, _Mapping]]] = ...) -> None: ...

class DraftKind(_message.Message):
    __slots__ = ("temperature_class", "workload", "num_drafts", "reached", "accepted")
    TEMPERATURE_CLASS_FIELD_NUMBER: _ClassVar[int]
    WORKLOAD_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    REACHED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    temperature_class: int
    workload: str
    num_drafts: int
    reached: int
    accepted: int
    def __init__(self, temperature_class: _Optional[int] = ..., workload: _Optional[str] = ..., num_drafts: _Optional[int] = ..., reached: _Optional[int] = ..., accepted: _Optional[int] = ...) -> None: ...

class DraftCost(_message.Message):
    __slots__ = ("size_class", "drafting", "verifying")
    SIZE_CLASS_FIELD_NUMBER: _ClassVar[int]
    DRAFTING_FIELD_NUMBER: _ClassVar[int]
    VERIFYING_FIELD_NUMBER: _ClassVar[int]
    size_class: int
    drafting: float
    verifying: float
    def __init__(self, size_class: _Optional[int] = ..., drafting: _Optional[float] = ..., verifying: _Optional[float] = ...) -> None: ...
