"""One exception tree. Each class knows its gRPC status, its HTTP status and its OpenAI error type.

Messages name what was wrong, what was expected and what to do. They travel unchanged from a worker to the client.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar


class BatonError(Exception):
    """Root of every error that baton raises on purpose.

    Attributes:
        code: stable machine-readable name, also sent over gRPC so that the peer rebuilds the same class.
        grpc_status: name of a ``grpc.StatusCode`` member.
        http_status: status of the HTTP response when the error reaches a client.
        error_type: ``error.type`` in OpenAI's error shape.
        param: the request parameter at fault, if one is.
    """

    code: ClassVar[str] = "internal_error"
    grpc_status: ClassVar[str] = "INTERNAL"
    http_status: ClassVar[int] = 500
    error_type: ClassVar[str] = "server_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InternalError(BatonError):
    """A fault of baton itself. The request ends with this error; other requests continue."""

    code = "internal_error"


class OutOfMemoryError(InternalError):
    """A worker had no memory for the request, twice or outside of a step. Another worker, or a later try, may have."""

    code = "out_of_memory"
    grpc_status = "RESOURCE_EXHAUSTED"
    http_status = 503


class ConfigError(BatonError):
    """A configuration value cannot be used."""

    code = "invalid_config"
    grpc_status = "INVALID_ARGUMENT"
    http_status = 400
    error_type = "invalid_request_error"


class InvalidRequestError(BatonError):
    """The request itself is wrong; sending it again cannot help."""

    code = "invalid_request"
    grpc_status = "INVALID_ARGUMENT"
    http_status = 400
    error_type = "invalid_request_error"


class ContextLengthError(InvalidRequestError):
    """Prompt plus requested output do not fit into the model's context or into the KV cache."""

    code = "context_length_exceeded"


class UnsupportedParameterError(InvalidRequestError):
    """baton knows the parameter but does not support this value."""

    code = "unsupported_parameter"


class RequestTooLargeError(InvalidRequestError):
    """The HTTP body is larger than the configured limit."""

    code = "request_too_large"
    grpc_status = "RESOURCE_EXHAUSTED"
    http_status = 413


class UnsupportedMediaTypeError(InvalidRequestError):
    """The HTTP body is not announced as plain UTF-8 JSON."""

    code = "unsupported_media_type"
    http_status = 415


class SlowRequestError(InvalidRequestError):
    """The client took too long to send its HTTP request."""

    code = "request_timeout"
    grpc_status = "DEADLINE_EXCEEDED"
    http_status = 408


class ModelNotFoundError(BatonError):
    """The request names a model that this cluster does not serve."""

    code = "model_not_found"
    grpc_status = "NOT_FOUND"
    http_status = 404
    error_type = "invalid_request_error"


class InvalidApiKeyError(BatonError):
    """The endpoint requires an API key, and the request has none or an unknown one."""

    code = "invalid_api_key"
    grpc_status = "UNAUTHENTICATED"
    http_status = 401
    error_type = "invalid_request_error"


class PermissionDeniedError(BatonError):
    """The API key is known but not allowed to do this."""

    code = "permission_denied"
    grpc_status = "PERMISSION_DENIED"
    http_status = 403
    error_type = "invalid_request_error"


class UntrustedOriginError(BatonError):
    """The request comes from a web page, or under a name, that the endpoint does not trust."""

    code = "untrusted_origin"
    grpc_status = "PERMISSION_DENIED"
    http_status = 403
    error_type = "invalid_request_error"


class NotFoundError(BatonError):
    """A named thing (a request id, a pool, a worker) does not exist."""

    code = "not_found"
    grpc_status = "NOT_FOUND"
    http_status = 404
    error_type = "invalid_request_error"


class ConflictError(BatonError):
    """The named thing is in a state that does not allow this."""

    code = "conflict"
    grpc_status = "FAILED_PRECONDITION"
    http_status = 409
    error_type = "invalid_request_error"


class StorageError(BatonError):
    """A file cannot be written; the message names it."""

    code = "storage_failed"


class StorageFullError(StorageError):
    """A disk, or the database of jobs, has no room left; the message names it."""

    code = "storage_full"
    grpc_status = "RESOURCE_EXHAUSTED"
    http_status = 507


class JobsUnavailableError(BatonError):
    """The folder or the database of jobs cannot be used, or jobs are disabled."""

    code = "jobs_unavailable"
    grpc_status = "UNAVAILABLE"
    http_status = 503


class UnsupportedModelError(BatonError):
    """The model cannot run on this engine; raised at start, with the reason."""

    code = "unsupported_model"
    grpc_status = "FAILED_PRECONDITION"
    error_type = "invalid_request_error"


class NotFusableError(UnsupportedModelError):
    """The fused decoder does not support a part of the model; transformers' own modules can compute it."""


class ModelUnavailableError(BatonError):
    """A model can be neither found nor made; the message says what to do."""

    code = "model_unavailable"
    grpc_status = "FAILED_PRECONDITION"
    http_status = 503


class OverloadedError(BatonError):
    """The cluster accepts no more work at the moment.

    Attributes:
        retry_after_s: seconds after which the client should try again.
        reason: machine-readable reason; empty when unknown.
        predicted_wait_s: seconds until there would have been room; ``None`` when unknown.
    """

    code = "overloaded"
    grpc_status = "RESOURCE_EXHAUSTED"
    http_status = 429
    error_type = "rate_limit_error"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float = 1.0,
        reason: str = "",
        predicted_wait_s: float | None = None,
    ) -> None:
        super().__init__(message, param=param)
        self.retry_after_s = retry_after_s
        self.reason = reason
        self.predicted_wait_s = predicted_wait_s


class RateLimitError(OverloadedError):
    """The API key has used up its limits; the cluster may have room for others.

    Attributes:
        headers: HTTP response headers with the key's limits and what is left of them.
    """

    code = "rate_limit_exceeded"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float = 1.0,
        reason: str = "",
        predicted_wait_s: float | None = None,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(
            message, param=param, retry_after_s=retry_after_s, reason=reason, predicted_wait_s=predicted_wait_s
        )
        self.headers = headers


class EndpointFullError(OverloadedError):
    """The endpoint has too many connections, or too many bytes of requests that are not complete."""

    code = "endpoint_full"
    grpc_status = "UNAVAILABLE"
    http_status = 503
    error_type = "server_error"


class NoWorkerError(BatonError):
    """There is no healthy worker of the needed role."""

    code = "no_worker_available"
    grpc_status = "UNAVAILABLE"
    http_status = 503


class WorkerLostError(BatonError):
    """A worker died or became unreachable while it served the request."""

    code = "worker_lost"
    grpc_status = "UNAVAILABLE"
    http_status = 503


class ControllerLostError(BatonError):
    """The process that owns the cluster's workers is gone; requests for tokens do not need it."""

    code = "controller_lost"
    grpc_status = "UNAVAILABLE"
    http_status = 503


class OutOfBlocksError(BatonError):
    """The KV cache has too few free blocks for the request."""

    code = "out_of_kv_blocks"
    grpc_status = "RESOURCE_EXHAUSTED"
    http_status = 503


class LayoutMismatchError(BatonError):
    """Two workers hold different models, dtypes or KV layouts; found at the handshake, before any KV byte moves."""

    code = "kv_layout_mismatch"
    grpc_status = "FAILED_PRECONDITION"


class ChecksumError(BatonError):
    """KV bytes arrived different from those that were sent."""

    code = "kv_checksum_mismatch"
    grpc_status = "DATA_LOSS"


class TransferError(BatonError):
    """A KV hand-off broke off."""

    code = "kv_transfer_failed"
    grpc_status = "ABORTED"
    http_status = 503


class DeadlineError(BatonError):
    """The request, or one of its stages, took longer than its deadline."""

    code = "deadline_exceeded"
    grpc_status = "DEADLINE_EXCEEDED"
    http_status = 504
    error_type = "timeout_error"


class RequestCancelledError(BatonError):
    """The client went away or aborted the request."""

    code = "request_cancelled"
    grpc_status = "CANCELLED"
    http_status = 499


def error_classes() -> dict[str, type[BatonError]]:
    """Every error class by its ``code``."""
    found: dict[str, type[BatonError]] = {}
    pending: list[type[BatonError]] = [BatonError]
    while pending:
        cls = pending.pop()
        # Ray derives a class from the class of whatever a task raised; it only inherits the code.
        if cls is not BatonError and "code" in vars(cls):
            found[cls.code] = cls
        pending.extend(cls.__subclasses__())
    return found


def rebuild_error(code: str, message: str) -> BatonError:
    """Rebuilds a peer's error from its ``code`` and message; an unknown code becomes :class:`InternalError`."""
    return error_classes().get(code, InternalError)(message)
