"""What a call of the client can end with.

    PdserveError
    ├── InvalidRequestError        the request cannot be served as it is; ``code`` and ``param`` say what is wrong
    │   ├── ContextLengthError     prompt + max_tokens is more than the model takes
    │   └── ModelNotFoundError     the gateway serves another model
    ├── OverloadedError            too much at once; the same may work after ``retry_after_s``
    ├── UnavailableError           no router, no worker, or one was lost; the same may work in a moment
    │   └── ConnectionFailedError  no gateway answers at any endpoint
    ├── DeadlineExceededError      the request did not end in its time; the workers have dropped it
    ├── RequestCancelledError      ``cancel`` was called, or the client was closed
    ├── SlowConsumerError          the stream was not read fast enough, and was cut off
    └── InternalError              a fault of the server; its log has the cause

Imports nothing, so that it can be caught where grpc is not loaded.
"""

from __future__ import annotations

ERROR_DETAIL_KEY = "pdserve-error-bin"
"""Of the trailing metadata that carries an ErrorDetail."""


class PdserveError(Exception):
    """Base of all. ``str(error)`` names the remedy where there is one."""

    retryable = False
    """Whether the same request may succeed later."""

    def __init__(
        self,
        message: str,
        *,
        code: str = "",
        param: str = "",
        retry_after_s: float = 0.0,
        request_id: str = "",
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        """As in the HTTP API, for example ``context_length_exceeded``."""
        self.param = param
        """The field that is wrong."""
        self.retry_after_s = retry_after_s
        """0 when the server gave no hint."""
        self.request_id = request_id
        """Names the request in the server's logs and in /debug/requests."""


class InvalidRequestError(PdserveError):
    """The request cannot be served as it is."""


class ContextLengthError(InvalidRequestError):
    """Prompt and output are too long for the model."""


class ModelNotFoundError(InvalidRequestError):
    """The gateway serves another model."""


class OverloadedError(PdserveError):
    """Too much at once."""

    retryable = True


class UnavailableError(PdserveError):
    """No router or worker could serve the request, or one was lost in the middle."""

    retryable = True


class ConnectionFailedError(UnavailableError):
    """No gateway answered."""


class DeadlineExceededError(PdserveError):
    """The deadline passed."""


class RequestCancelledError(PdserveError):
    """The caller ended the request."""


class SlowConsumerError(PdserveError):
    """The caller did not read its stream."""


class InternalError(PdserveError):
    """A fault of the server."""
