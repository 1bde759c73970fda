"""Requests and outputs between protobuf (the wire) and msgspec (the engine). Pure functions, both directions."""

from __future__ import annotations

from engine.messages import (
    AddRequest,
    ErrorCode,
    FinishReason,
    ReceiveKV,
    RequestOutput,
    SamplingParams,
    SendKV,
    Timings,
    TokenLogprobs,
)
from pdserve.v1 import inference_pb2 as pb

FINISH_TO_PB = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
    FinishReason.ERROR: pb.FINISH_REASON_ERROR,
    FinishReason.TIMEOUT: pb.FINISH_REASON_TIMEOUT,
}
FINISH_FROM_PB = {value: key for key, value in FINISH_TO_PB.items()}

CODE_TO_PB = {
    ErrorCode.INVALID_REQUEST: pb.ERROR_CODE_INVALID_REQUEST,
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: pb.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED,
    ErrorCode.PROMPT_TOO_LARGE: pb.ERROR_CODE_PROMPT_TOO_LARGE,
    ErrorCode.OVERLOADED: pb.ERROR_CODE_OVERLOADED,
    ErrorCode.WORKER_LOST: pb.ERROR_CODE_WORKER_LOST,
    ErrorCode.HANDOFF_FAILED: pb.ERROR_CODE_HANDOFF_FAILED,
    ErrorCode.INTERNAL: pb.ERROR_CODE_INTERNAL,
}


class InvalidRequest(Exception):
    """A request that no engine could run; the message says why."""


def to_add_request(request: pb.GenerateRequest, engine_request_id: str) -> AddRequest:
    """Raises:
    InvalidRequest: fields that contradict each other or are missing.
    """
    if not request.prompt_token_ids:
        raise InvalidRequest("prompt_token_ids is empty: send at least one token")
    if not request.timeout_s > 0:
        raise InvalidRequest(f"timeout_s is {request.timeout_s}: a request needs the time that is left to it, above 0")
    if request.sampling.max_tokens < 1:
        raise InvalidRequest("max_tokens is 0: ask for at least one token")
    return AddRequest(
        request_id=engine_request_id,
        prompt_token_ids=list(request.prompt_token_ids),
        output_token_ids=list(request.output_so_far),
        sampling=to_sampling(request.sampling),
        timeout_s=request.timeout_s,
        cache_salt=request.cache_salt,
        priority=request.priority,
        handoff=_to_handoff(request.handoff) if request.HasField("handoff") else None,
    )


def to_sampling(sampling: pb.SamplingParams) -> SamplingParams:
    """Fields that were not set mean off."""
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p or 1.0,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty or 1.0,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=dict(sampling.logit_bias),
        seed=sampling.seed,
        logprobs=sampling.logprobs if sampling.HasField("logprobs") else None,
        stop_token_ids=list(sampling.stop_token_ids),
        min_tokens=sampling.min_tokens,
        ignore_eos=sampling.ignore_eos,
    )


def _to_handoff(handoff: pb.Handoff) -> SendKV | ReceiveKV:
    if not handoff.transfer_id or not handoff.peer.worker_id:
        raise InvalidRequest("handoff needs a transfer_id and a peer")
    if handoff.side == pb.Handoff.SIDE_SEND:
        if not handoff.peer.address:
            raise InvalidRequest(f"handoff to {handoff.peer.worker_id} needs the peer's address")
        return SendKV(
            transfer_id=handoff.transfer_id,
            attempt=handoff.attempt,
            peer_address=handoff.peer.address,
            peer_id=handoff.peer.worker_id,
            peer_incarnation=handoff.peer.incarnation,
        )
    if handoff.side == pb.Handoff.SIDE_RECEIVE:
        return ReceiveKV(
            transfer_id=handoff.transfer_id,
            attempt=handoff.attempt,
            peer_id=handoff.peer.worker_id,
            peer_incarnation=handoff.peer.incarnation,
        )
    raise InvalidRequest("handoff needs a side: send or receive")


def output_to_pb(output: RequestOutput, request_id: str) -> pb.Output:
    message = pb.Output(
        request_id=request_id,
        token_ids=output.token_ids,
        logprobs=[
            pb.TokenLogprobs(logprob=item.logprob, top_token_ids=item.top_token_ids, top_logprobs=item.top_logprobs)
            for item in output.logprobs
        ],
    )
    if output.timings is not None:
        message.phases.CopyFrom(
            pb.Phases(
                prefill_queue_s=output.timings.prefill_queue_s,
                handoff_wait_s=output.timings.handoff_wait_s,
                prefill_s=output.timings.prefill_s,
                transfer_s=output.timings.transfer_s,
                handoff_relay_s=output.timings.relay_s,
            )
        )
        if (transfer := output.timings.transfer) is not None:
            message.transfer.CopyFrom(
                pb.Transfer(
                    lane=transfer.lane,
                    seconds=transfer.seconds,
                    bytes=transfer.num_bytes,
                    cached_tokens=transfer.cached_tokens,
                )
            )
    if output.cached_tokens is not None:
        message.cached_tokens = output.cached_tokens
    if output.sent_kv_tokens is not None:
        message.sent_kv_tokens = output.sent_kv_tokens
    if output.finish_reason is not None:
        message.finish.reason = FINISH_TO_PB[output.finish_reason]
        if output.stop_token_id is not None:
            message.finish.stop_token_id = output.stop_token_id
        if output.error_code is not None:
            message.finish.failure.CopyFrom(
                pb.Failure(
                    code=CODE_TO_PB[output.error_code],
                    message=output.error_message,
                    retryable=output.retryable,
                    peer_lost=output.peer_lost,
                )
            )
        elif output.finish_reason is FinishReason.TIMEOUT:
            message.finish.failure.CopyFrom(
                pb.Failure(code=pb.ERROR_CODE_DEADLINE_EXCEEDED, message=output.error_message)
            )
        elif output.finish_reason is FinishReason.ABORT:
            message.finish.failure.CopyFrom(pb.Failure(code=pb.ERROR_CODE_ABORTED, message=output.error_message))
    return message


def is_first_output(message: pb.Output) -> bool:
    """Whether a decode worker could go on from it: one token, or an end."""
    if message.HasField("finish"):
        return message.finish.reason in FINISH_FROM_PB
    return len(message.token_ids) == 1


def first_output_from_pb(message: pb.Output, request_id: str) -> RequestOutput:
    """A prefill worker's first output, as the decode engine emits it."""
    phases = message.phases
    return RequestOutput(
        request_id=request_id,
        token_ids=list(message.token_ids),
        logprobs=[
            TokenLogprobs(item.logprob, list(item.top_token_ids), list(item.top_logprobs)) for item in message.logprobs
        ],
        finish_reason=FINISH_FROM_PB[message.finish.reason] if message.HasField("finish") else None,
        stop_token_id=message.finish.stop_token_id if message.finish.HasField("stop_token_id") else None,
        timings=Timings(
            prefill_queue_s=phases.prefill_queue_s,
            handoff_wait_s=phases.handoff_wait_s,
            prefill_s=phases.prefill_s,
        ),
        cached_tokens=message.cached_tokens,
    )


def failure_output(request_id: str, code: pb.ErrorCode.ValueType, message: str, retryable: bool) -> pb.Output:
    """A terminal output that the service makes itself."""
    failure = pb.Failure(code=code, message=message, retryable=retryable)
    return pb.Output(request_id=request_id, finish=pb.Finish(reason=pb.FINISH_REASON_ERROR, failure=failure))
