"""What a decode engine makes of a sender's words that its protocol does not have: the transfer ends, not the engine."""

from __future__ import annotations

import pytest

from decode_service.engine_main import frame_from_pb
from kv_transfer.protocol import Abort, End
from pdserve.v1 import inference_pb2 as pb
from pdserve.v1 import worker_pb2

FINISHED = pb.Finish(reason=pb.FINISH_REASON_STOP)


def end_with(first_output: pb.Output) -> worker_pb2.HandoffFrame:
    frame = worker_pb2.HandoffFrame(transfer_id="t", attempt=1)
    frame.end.num_segments = 3
    frame.end.first_output.CopyFrom(first_output)
    return frame


@pytest.mark.parametrize(
    "first_output",
    [pb.Output(), pb.Output(token_ids=[1, 2]), pb.Output(finish=pb.Finish(reason=99)), pb.Output(finish=pb.Finish())],
)
def test_an_end_that_nobody_could_go_on_from(first_output: pb.Output) -> None:
    assert isinstance(frame_from_pb(end_with(first_output)).body, Abort)


@pytest.mark.parametrize(
    ("first_output", "finished"),
    [
        (pb.Output(token_ids=[7]), False),
        (pb.Output(token_ids=[7], finish=FINISHED), True),
        (pb.Output(finish=FINISHED), True),
    ],
)
def test_an_end(first_output: pb.Output, finished: bool) -> None:
    assert frame_from_pb(end_with(first_output)).body == End(3, first_output.SerializeToString(), finished)


def test_a_word_of_another_version() -> None:
    assert isinstance(frame_from_pb(worker_pb2.HandoffFrame(transfer_id="t", attempt=1)).body, Abort)
