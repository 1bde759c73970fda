"""What a client is told when something goes wrong: one exception, its HTTP status and its OpenAI error object.

    where it arises                      status  code
    the request itself                   400     invalid_value, unsupported_parameter, unknown_parameter, ...
    an unknown model                     404     model_not_found
    prompt + max_tokens too long         400     context_length_exceeded
    a body too large                     413     request_too_large
    a compressed body                    415     unsupported_encoding
    too much at once, here or below      429     overloaded           (Retry-After)
    no router, no worker                 503     no_workers, router_unavailable (Retry-After)
    a worker or hand-off lost            503     worker_lost, handoff_failed    (Retry-After)
    the deadline                         504     deadline_exceeded
    anything else                        500     internal_error

Before the first byte of an answer it is the HTTP status and the body; inside a stream it is one event, then the end.
"""

from __future__ import annotations

import math
from typing import Any

from pdserve.v1 import inference_pb2 as pb

RETRY_AFTER_S = 1.0
MAX_MESSAGE_CHARS = 1000
"""Of what a client is told: messages quote what it sent, and a gRPC status is a header with a limit of its own."""


class GatewayError(Exception):
    """An error that the client sees."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        message, self.param = _shortened(message), _shortened(param) if param else param
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.retry_after_s = retry_after_s

    @property
    def error_type(self) -> str:
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    def body(self) -> dict[str, Any]:
        """The OpenAI error object."""
        return {"error": {"message": self.message, "type": self.error_type, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        if self.retry_after_s is None:
            return {}
        return {"retry-after": str(max(1, math.ceil(self.retry_after_s)))}


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_MESSAGE_CHARS else f"{text[:MAX_MESSAGE_CHARS]}... ({len(text)} characters)"


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> GatewayError:
    """The request cannot be served as it is."""
    return GatewayError(400, message, param=param, code=code)


def unsupported(param: str, remedy: str) -> GatewayError:
    """A field that the API knows and this server does not serve: refused by name, never ignored."""
    return invalid(f"{param!r} is not supported: {remedy}", param, "unsupported_parameter")


def context_length_exceeded(max_model_len: int, prompt_tokens: int, max_tokens: int, param: str) -> GatewayError:
    """prompt + max_tokens is more than the model takes."""
    return invalid(
        f"This model's maximum context length is {max_model_len} tokens. However, you requested "
        f"{prompt_tokens + max_tokens} tokens ({prompt_tokens} in the {param}, {max_tokens} in the completion). "
        f"Please reduce the length of the {param} or of the completion.",
        param,
        "context_length_exceeded",
    )


def prompt_too_long(max_model_len: int, least_tokens: int, param: str) -> GatewayError:
    """The prompt alone is more than the model takes, and so long that nobody counts exactly."""
    return invalid(
        f"This model's maximum context length is {max_model_len} tokens. However, there are at least "
        f"{least_tokens} tokens in the {param}. Please reduce the length of the {param}.",
        param,
        "context_length_exceeded",
    )


def overloaded(message: str, retry_after_s: float = RETRY_AFTER_S) -> GatewayError:
    """Too much at once; the client should try again."""
    return GatewayError(429, message, code="overloaded", retry_after_s=retry_after_s)


def draining() -> GatewayError:
    """This gateway leaves; another one, or this address a little later, will do."""
    return GatewayError(503, "This gateway is leaving: try again.", code="draining", retry_after_s=RETRY_AFTER_S)


def router_unavailable(message: str) -> GatewayError:
    """No router answers."""
    return GatewayError(503, message, code="router_unavailable", retry_after_s=RETRY_AFTER_S)


def deadline_exceeded(timeout_s: float) -> GatewayError:
    """The request's time is over."""
    return GatewayError(
        504, f"The request did not finish within its {timeout_s:g} s: allow more with x-request-timeout-s.",
        code="deadline_exceeded",
    )  # fmt: skip


def slow_consumer() -> GatewayError:
    """The client reads too slowly."""
    return GatewayError(503, "The client did not read its stream fast enough.", code="slow_consumer")


def internal() -> GatewayError:
    """Our own fault; the log has the cause."""
    return GatewayError(500, "Internal error: see the gateway's log for this x-request-id.", code="internal_error")


_STATUS_AND_CODE: dict[int, tuple[int, str]] = {
    pb.ERROR_CODE_INVALID_REQUEST: (400, "invalid_value"),
    pb.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED: (400, "context_length_exceeded"),
    pb.ERROR_CODE_PROMPT_TOO_LARGE: (400, "prompt_too_large"),
    pb.ERROR_CODE_OVERLOADED: (429, "overloaded"),
    pb.ERROR_CODE_NO_WORKERS: (503, "no_workers"),
    pb.ERROR_CODE_WORKER_LOST: (503, "worker_lost"),
    pb.ERROR_CODE_HANDOFF_FAILED: (503, "handoff_failed"),
    pb.ERROR_CODE_DEADLINE_EXCEEDED: (504, "deadline_exceeded"),
    pb.ERROR_CODE_ABORTED: (503, "aborted"),
    pb.ERROR_CODE_SLOW_CONSUMER: (503, "slow_consumer"),
}


def from_failure(failure: pb.Failure) -> GatewayError:
    """What the router said, for the client."""
    status, code = _STATUS_AND_CODE.get(failure.code, (500, "internal_error"))
    retry_after_s = None
    if status in (429, 503):
        retry_after_s = failure.retry_after_s or RETRY_AFTER_S
    return GatewayError(status, failure.message or code, code=code, retry_after_s=retry_after_s)
