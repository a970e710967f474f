"""Errors in OpenAI's shape: the HTTP status, type, code and message of each failure.

For endpoints of other servers that clients ask for and that aren't here, a 404 says the reason.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

from twinpool.contracts.errors import ErrorKind, RequestError, TwinpoolError
from twinpool.contracts.messages.worker_events import Done
from twinpool.router.openai.parse_request import GenerateRequest, UnknownModel
from twinpool.router.security.tenant_accounts import TenantLimited

SHUTDOWN_RETRY_S = 5
"""When a request may be tried again that met a server which ends: one that takes its place needs some time."""


ASLEEP_RETRY_S = 10
"""When a request may be tried again that met a cluster which sleeps: who wakes it does so when it is to serve."""


class QueueFull(TwinpoolError):
    """Raised when `router.max_queue` choices are in flight."""

    def __init__(self, message: str, asked: int = 1) -> None:
        """`asked`: choices that there is no room for."""
        super().__init__(message)
        self.numbers = {"answers_asked": asked}


class ImagesFull(QueueFull):
    """Raised when the images of answers in flight leave no room for a request's."""

    def __init__(self, asked: int, held: int, limit: int) -> None:
        """All in bytes of pixels."""
        super().__init__(f"images of {held} bytes of pixels are in flight, of {limit} at most; try again later")
        self.numbers = {"image_bytes_asked": asked, "image_bytes_held": held, "image_bytes": limit}


class SloUnreachable(TwinpoolError):
    """Raised where a request's first token is predicted to come later than it is of use.

    All in milliseconds from the request's arrival; `retry_after_s`: whole seconds after which it may be tried again.
    """

    def __init__(self, predicted_ms: float, slo_ms: float) -> None:
        super().__init__(
            f"its first token is expected after {predicted_ms:,.0f} ms, and of use within {slo_ms:,.0f} ms; try later"
        )
        self.retry_after_s = max(1, math.ceil((predicted_ms - slo_ms) / 1000))
        self.numbers = {"expected_ms": round(predicted_ms, 3), "allowed_ms": slo_ms}


class ShuttingDown(TwinpoolError):
    """Raised where a request comes while the server drains, to end."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down and takes no new requests; try again later, or another server")


class Asleep(TwinpoolError):
    """Raised where a request comes while the cluster sleeps, and can't wait for it to wake."""

    def __init__(self, why: str = "the cluster sleeps, and takes requests once it was woken") -> None:
        super().__init__(why)


class NoWorkers(TwinpoolError):
    """Raised where a request that is previewed would have to wait for workers."""


class KeyReused(TwinpoolError):
    """Raised where an Idempotency-Key comes with another body than the one that it was first sent with."""


class Superseded(TwinpoolError):
    """Raised where the client has come back for an answer on another connection, before this one had begun."""


class NotJson(TwinpoolError):
    """Raised where a body says that it is something else than JSON, or is encoded; none of it is read."""

    def __init__(self, why: str = "the body must be JSON: send Content-Type: application/json") -> None:
        super().__init__(why)


class BodyTooLarge(TwinpoolError):
    """Raised while reading a body that is larger than the limit (`router.max_body_bytes`)."""


class BufferFull(TwinpoolError):
    """Raised while reading a body when those being received hold `router.body_buffer_bytes`."""

    def __init__(self, message: str, asked: int = 0, held: int = 0, limit: int = 0) -> None:
        """All in bytes."""
        super().__init__(message)
        self.numbers = {"body_bytes_asked": asked, "body_bytes_held": held, "body_buffer_bytes": limit}


class ClientGone(TwinpoolError):
    """Raised when the client has closed its connection: the request needs no answer."""


@dataclass(frozen=True, slots=True)
class ApiError:
    """One error response; `to_json` is its body."""

    status: int
    message: str
    type: str
    code: str | None = None
    param: str | None = None
    retry_after_s: int | None = None

    def to_json(self) -> bytes:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()


_OF_KIND: dict[ErrorKind, tuple[int, str, str]] = {
    ErrorKind.INVALID: (400, "invalid_request_error", "invalid"),
    ErrorKind.TOO_LONG: (400, "invalid_request_error", "invalid"),
    ErrorKind.GRAMMAR: (400, "invalid_request_error", "invalid"),
    ErrorKind.OVERLOADED: (503, "server_error", "overloaded"),
    ErrorKind.ADAPTER: (503, "server_error", "adapter_unavailable"),
    ErrorKind.DEADLINE: (504, "server_error", "deadline"),
    ErrorKind.LATE: (429, "rate_limit_error", "slo_unreachable"),
    ErrorKind.NONFINITE: (500, "server_error", "nonfinite_logits"),
    ErrorKind.CANCELLED: (503, "server_error", "cancelled"),
    ErrorKind.SUPERSEDED: (409, "invalid_request_error", "superseded"),
}


_IN_RESPONSES = {"messages": "input", "response_format": "text"}
"""Names of chats' fields, and of those that they come from in the Responses API."""


def failure_of_done(done: Done, request: GenerateRequest) -> ApiError:
    """Return the error response for a request that a worker or the router core has ended with an error; one of the
    client's names the field at fault."""
    status, kind, code = _OF_KIND.get(done.error or ErrorKind.WORKER, (503, "server_error", "worker_failed"))
    retry = 1 if status in (429, 503) else None
    param = _field_at_fault(done.error, request)
    return ApiError(status, done.message or "the request failed", kind, code, param, retry)


def _field_at_fault(kind: ErrorKind | None, request: GenerateRequest) -> str | None:
    match kind:
        case ErrorKind.TOO_LONG:
            name = "messages" if request.chat else "prompt"
        case ErrorKind.GRAMMAR if request.grammar_field:
            name = request.grammar_field.partition(".")[0]
        case _:
            return None
    return _IN_RESPONSES.get(name, name) if request.shape == "responses" else name


def failure_of(error: TwinpoolError) -> ApiError:
    """Return the error response for an exception raised while a request was read or admitted."""
    match error:
        case UnknownModel():
            return ApiError(404, str(error), "invalid_request_error", "model_not_found", error.param)
        case RequestError():
            return ApiError(400, str(error), "invalid_request_error", None, error.param)
        case TenantLimited():
            return ApiError(429, str(error), "rate_limit_error", "tenant_limit", retry_after_s=error.retry_after_s)
        case SloUnreachable():
            return ApiError(429, str(error), "rate_limit_error", "slo_unreachable", retry_after_s=error.retry_after_s)
        case KeyReused():
            return ApiError(422, str(error), "invalid_request_error", "idempotency_key_reused")
        case Superseded():
            return ApiError(409, str(error), "invalid_request_error", "superseded")
        case ShuttingDown():
            return ApiError(503, str(error), "server_error", "shutting_down", retry_after_s=SHUTDOWN_RETRY_S)
        case Asleep():
            return ApiError(503, str(error), "server_error", "asleep", retry_after_s=ASLEEP_RETRY_S)
        case NoWorkers():
            return ApiError(503, str(error), "server_error", "no_workers", retry_after_s=1)
        case QueueFull():
            return ApiError(429, str(error), "rate_limit_error", "queue_full", retry_after_s=1)
        case NotJson():
            return ApiError(415, str(error), "invalid_request_error", "not_json")
        case BodyTooLarge():
            return ApiError(413, str(error), "invalid_request_error", "body_too_large")
        case BufferFull():
            return ApiError(503, str(error), "server_error", "body_buffer_full", retry_after_s=5)
        case ReaderFailed():
            return ApiError(503, str(error), "server_error", "reader_failed", retry_after_s=1)
        case _:
            return ApiError(500, str(error), "server_error", "internal")


class ReaderFailed(TwinpoolError):
    """Raised when a reader process failed on a body by a fault of its own; the body may be fine."""


class ReaderEnded(ReaderFailed):
    """Raised when a reader process ended before it had answered a body."""


_NOT_HERE = {
    "embeddings are at /v1/embeddings": ("/embeddings",),
    "vectors are at /v1/embeddings, and classes at /classify": ("/pooling",),
    "nothing is moderated here": ("/v1/moderations",),
    "adapters (LoRA) are loaded by /v1/load_lora_adapter": ("/load_lora_adapter", "/unload_lora_adapter"),
    "text is all that is made here: no images and no audio": (
        "/v1/images", "/v1/audio", "/v1/videos", "/v1/realtime",
    ),
    "nothing is stored here: send each request with its whole conversation": (
        "/v1/uploads", "/v1/conversations", "/v1/threads", "/v1/assistants",
        "/v1/vector_stores", "/v1/containers",
    ),
    "models aren't trained here": ("/v1/fine_tuning", "/v1/evals"),
}  # fmt: skip
_REASON_OF_PATH = {path: why for why, paths in _NOT_HERE.items() for path in paths}


def unsupported_reason(path: str) -> str:
    """Return why an endpoint of a known API isn't here, empty for any other path."""
    parts = path.split("/")
    return next((_REASON_OF_PATH[head] for size in (3, 2) if (head := "/".join(parts[:size])) in _REASON_OF_PATH), "")
