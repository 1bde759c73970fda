"""Every backend passes the same suite. One pair of processes serves all tests; each test configures it anew.

Backends of GPUs run where there are any: with both sides on one GPU, and, where there are two, with one each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch

from tests.conformance.jobs import Config
from tests.conformance.pair import Pair

MakePair = Callable[..., Pair]


@dataclass(frozen=True)
class Lane:
    """A backend, and where its two sides have their KV."""

    backend: str
    sender_device: str = "cpu"
    receiver_device: str = "cpu"

    @property
    def num_gpus(self) -> int:
        return len({self.sender_device, self.receiver_device} - {"cpu"})


ON_HOSTS = {name: Lane(name) for name in ("shm", "tcp", "ucx")}
ON_GPUS = {
    "cuda_ipc": Lane("cuda_ipc", "cuda:0", "cuda:0"),
    "cuda_ipc-peers": Lane("cuda_ipc", "cuda:0", "cuda:1"),
    "nccl": Lane("nccl", "cuda:0", "cuda:1"),
    "ucx-gpu": Lane("ucx", "cuda:0", "cuda:0"),
    "ucx-gpu-peers": Lane("ucx", "cuda:0", "cuda:1"),
    "shm-gpu": Lane("shm", "cuda:0", "cuda:0"),
    "tcp-gpu-to-cpu": Lane("tcp", "cuda:0", "cpu"),
    "tcp-cpu-to-gpu": Lane("tcp", "cpu", "cuda:0"),
}
"""Also host backends between GPUs, whose engines pack into pinned memory."""


@pytest.fixture(scope="session")
def processes() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


@pytest.fixture(params=[*ON_HOSTS, *(pytest.param(name, marks=pytest.mark.gpu) for name in ON_GPUS)])
def lane(request: pytest.FixtureRequest) -> Lane:
    lane = (ON_HOSTS | ON_GPUS)[request.param]
    if lane.num_gpus > torch.cuda.device_count():
        pytest.skip(f"needs {lane.num_gpus} CUDA devices")
    return lane


@pytest.fixture
def make_pair(processes: Pair, lane: Lane) -> MakePair:
    """``make_pair(sender={...}, receiver={...})``: fields of Config that are not the default."""

    def make(sender: dict[str, object] | None = None, receiver: dict[str, object] | None = None) -> Pair:
        processes.configure(
            Config(lane.backend, "p", device=lane.sender_device, **(sender or {})),  # type: ignore[arg-type]
            Config(lane.backend, "d", device=lane.receiver_device, **(receiver or {})),  # type: ignore[arg-type]
        )
        return processes

    return make


@pytest.fixture
def pair(make_pair: MakePair) -> Pair:
    return make_pair()
