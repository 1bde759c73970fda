"""Streams of transfers: nobody else's."""

from __future__ import annotations

import pytest
import torch

from kv_transfer.cuda import CudaRuntime

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_stream_of_its_own_is_none_of_those_that_torch_gives_out_in_turn() -> None:
    runtime = CudaRuntime("cuda:0")
    torchs = {torch.cuda.Stream("cuda:0").cuda_stream for _ in range(100)}
    assert len(torchs) < 100, "torch makes as many as one asks for: ours are not needed any more"
    own = [runtime.make_stream() for _ in range(100)]
    assert len({stream.cuda_stream for stream in own} - torchs) == 100
    counter = torch.zeros((), dtype=torch.int64, device="cuda:0")
    for stream in own:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            counter.add_(1)
        torch.cuda.current_stream().wait_stream(stream)
        runtime.end_stream(stream)  # with work on it
    assert counter.item() == 100
