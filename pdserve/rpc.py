"""The SDK's side of gRPC: channel options, and failed calls to our errors. Shared by both clients."""

from __future__ import annotations

import grpc

from pdserve.channel import CHANNEL_OPTIONS
from pdserve.errors import (
    ERROR_DETAIL_KEY,
    ConnectionFailedError,
    ContextLengthError,
    DeadlineExceededError,
    InternalError,
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
    PdserveError,
    SlowConsumerError,
    UnavailableError,
)
from pdserve.v1 import gateway_pb2 as pb

REQUEST_ID = "x-request-id"
OPTIONS: list[tuple[str, int]] = [
    *CHANNEL_OPTIONS,
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2000),  # that long a connection may take
    ("grpc.max_reconnect_backoff_ms", 1000),
]

_BY_CODE: dict[str, type[PdserveError]] = {
    "context_length_exceeded": ContextLengthError,
    "prompt_too_large": ContextLengthError,
    "model_not_found": ModelNotFoundError,
    "slow_consumer": SlowConsumerError,
}
_BY_STATUS: dict[grpc.StatusCode, type[PdserveError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.NOT_FOUND: InvalidRequestError,
    grpc.StatusCode.UNIMPLEMENTED: InvalidRequestError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: OverloadedError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
}
_LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)
"""Without a detail of ours: the connection broke, or the gateway's process ended in the middle."""


def to_error(
    status: grpc.StatusCode,
    message: str,
    trailers: list[tuple[str, str | bytes]],
    *,
    address: str,
    request_id: str,
    deadline_s: float,
) -> PdserveError:
    """The error of a failed call that its caller did not cancel."""
    if status is grpc.StatusCode.DEADLINE_EXCEEDED:
        message = f"the request did not end within its {deadline_s:g} s: give it more with deadline_s"
        return DeadlineExceededError(message, code="deadline_exceeded", request_id=request_id)
    data = next((value for key, value in trailers if key == ERROR_DETAIL_KEY), None)
    if not isinstance(data, bytes):
        if status in _LOST:
            return connection_failed(address, message, request_id)
        return _BY_STATUS.get(status, InternalError)(message, request_id=request_id)
    detail = pb.ErrorDetail.FromString(data)
    kind = _BY_CODE.get(detail.code) or _BY_STATUS.get(status, InternalError)
    return kind(
        message, code=detail.code, param=detail.param, retry_after_s=detail.retry_after_s, request_id=request_id
    )


def connection_failed(address: str, reason: str, request_id: str) -> PdserveError:
    """Nobody answered, or the answer broke off."""
    return ConnectionFailedError(
        f"no answer from a gateway at {address} ({reason}): is it started, is that its --grpc-port?",
        code="connection_failed",
        request_id=request_id,
    )
