"""Terminal outputs that no engine made: what a hop says when it has to end a request itself.

Every request ends exactly once at every hop; whoever ends one (session, router, worker, gateway) builds the last Output
here, so that a failure always carries a code, a message and whether it is worth trying again.
"""

from __future__ import annotations

from pdserve.v1 import inference_pb2 as pb


def failed(
    request_id: str, code: pb.ErrorCode.ValueType, message: str, *, retryable: bool = False, retry_after_s: float = 0.0
) -> pb.Output:
    """The request ended with an error."""
    failure = pb.Failure(code=code, message=message, retryable=retryable, retry_after_s=retry_after_s)
    return pb.Output(request_id=request_id, finish=pb.Finish(reason=pb.FINISH_REASON_ERROR, failure=failure))


def timed_out(request_id: str, message: str) -> pb.Output:
    """The request's deadline passed."""
    failure = pb.Failure(code=pb.ERROR_CODE_DEADLINE_EXCEEDED, message=message)
    return pb.Output(request_id=request_id, finish=pb.Finish(reason=pb.FINISH_REASON_TIMEOUT, failure=failure))


def aborted(request_id: str, reason: str) -> pb.Output:
    """Someone above asked for the end; ``reason`` is that of the Abort."""
    failure = pb.Failure(code=pb.ERROR_CODE_ABORTED, message=reason)
    return pb.Output(request_id=request_id, finish=pb.Finish(reason=pb.FINISH_REASON_ABORT, failure=failure))
