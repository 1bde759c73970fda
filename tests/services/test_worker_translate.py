"""Requests and outputs keep every field between the wire and the engine, and what cannot be run is refused."""

from __future__ import annotations

import pytest

from engine.messages import ErrorCode, FinishReason, ReceiveKV, RequestOutput, SendKV, Timings, TokenLogprobs
from pdserve.v1 import inference_pb2 as pb
from pdserve.v1 import kv_pb2
from worker.translate import (
    CODE_TO_PB,
    FINISH_TO_PB,
    InvalidRequest,
    first_output_from_pb,
    output_to_pb,
    to_add_request,
)

PEER = kv_pb2.WorkerIdentity(worker_id="d-0", incarnation=5, address="10.0.0.1:80")


def request(**changed: object) -> pb.GenerateRequest:
    values: dict[str, object] = {
        "request_id": "r",
        "prompt_token_ids": [1, 2],
        "timeout_s": 5.0,
        "sampling": pb.SamplingParams(max_tokens=4),
    }
    return pb.GenerateRequest(**(values | changed))  # type: ignore[arg-type]


def test_every_sampling_field_arrives() -> None:
    sampling = pb.SamplingParams(
        max_tokens=7, temperature=0.5, top_p=0.75, top_k=3, min_p=0.25, repetition_penalty=1.5, presence_penalty=0.125,
        frequency_penalty=-0.5, logit_bias={9: -1.0}, seed=2**63 + 1, logprobs=0, stop_token_ids=[4, 5], min_tokens=2,
        ignore_eos=True,
    )  # fmt: skip
    got = to_add_request(request(sampling=sampling, output_so_far=[3], cache_salt="s", priority=-2), "p/r")
    assert got.request_id == "p/r"
    assert (got.prompt_token_ids, got.output_token_ids) == ([1, 2], [3])
    assert (got.timeout_s, got.cache_salt, got.priority, got.handoff) == (5.0, "s", -2, None)
    for field in pb.SamplingParams.DESCRIPTOR.fields:
        expected = getattr(sampling, field.name)
        if field.name == "logit_bias":
            expected = dict(expected)
        elif field.name == "stop_token_ids":
            expected = list(expected)
        assert getattr(got.sampling, field.name) == expected, field.name


def test_what_is_not_set_is_off() -> None:
    got = to_add_request(request(), "r").sampling
    assert (got.top_p, got.repetition_penalty, got.logprobs) == (1.0, 1.0, None)


def test_both_sides_of_a_handoff() -> None:
    send = pb.Handoff(side=pb.Handoff.SIDE_SEND, transfer_id="t", attempt=2, peer=PEER)
    receive = pb.Handoff(side=pb.Handoff.SIDE_RECEIVE, transfer_id="t", attempt=2, peer=PEER)
    assert to_add_request(request(handoff=send), "r").handoff == SendKV("t", 2, "10.0.0.1:80", "d-0", 5)
    assert to_add_request(request(handoff=receive), "r").handoff == ReceiveKV("t", 2, "d-0", 5)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"prompt_token_ids": []}, "prompt_token_ids"),
        ({"timeout_s": 0.0}, "timeout_s"),
        ({"timeout_s": float("nan")}, "timeout_s"),
        ({"sampling": pb.SamplingParams()}, "max_tokens"),
        ({"handoff": pb.Handoff(transfer_id="t", peer=PEER)}, "side"),
        ({"handoff": pb.Handoff(side=pb.Handoff.SIDE_SEND, peer=PEER)}, "transfer_id"),
        (
            {
                "handoff": pb.Handoff(
                    side=pb.Handoff.SIDE_SEND, transfer_id="t", peer=kv_pb2.WorkerIdentity(worker_id="d")
                )
            },
            "address",
        ),
    ],
)
def test_what_cannot_be_run_is_refused(changed: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        to_add_request(request(**changed), "r")


def test_a_first_output_survives_the_way_from_p_to_d() -> None:
    output = RequestOutput(
        request_id="p-side",
        token_ids=[42],
        logprobs=[TokenLogprobs(-0.5, [42, 7], [-0.5, -1.0])],
        finish_reason=FinishReason.STOP,
        stop_token_id=42,
        timings=Timings(prefill_queue_s=0.25, handoff_wait_s=0.5, prefill_s=1.0),
        cached_tokens=16,
    )
    wire = output_to_pb(output, "p-side").SerializeToString()
    output.request_id = "d-side"
    assert first_output_from_pb(pb.Output.FromString(wire), "d-side") == output


def test_all_reasons_and_codes_have_a_name_on_the_wire() -> None:
    assert set(FINISH_TO_PB) == set(FinishReason)
    assert set(CODE_TO_PB) == set(ErrorCode)
    failed = RequestOutput(
        request_id="r",
        finish_reason=FinishReason.ERROR,
        error_code=ErrorCode.HANDOFF_FAILED,
        error_message="why",
        retryable=True,
    )
    finish = output_to_pb(failed, "r").finish
    assert finish.reason == pb.FINISH_REASON_ERROR
    assert finish.failure == pb.Failure(code=pb.ERROR_CODE_HANDOFF_FAILED, message="why", retryable=True)
    late = output_to_pb(RequestOutput(request_id="r", finish_reason=FinishReason.TIMEOUT), "r").finish
    assert late.failure.code == pb.ERROR_CODE_DEADLINE_EXCEEDED
