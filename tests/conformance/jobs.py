"""What the conformance tests ask of two peers: how each is configured, and the requests that both are told of."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kv_transfer.layout import make_layout
from kv_transfer.transfer import TransferKey
from pdserve.v1 import kv_pb2

LAYERS, HEADS, DIM = 4, 2, 16


@dataclass(frozen=True)
class Config:
    """Of one peer."""

    backend: str
    worker_id: str
    device: str = "cpu"
    incarnation: int = 1
    block_size: int = 16
    dtype: str = "float32"
    fingerprint: str = "model"
    num_blocks: int = 512
    slots: int = 4
    slot_bytes: int = 64 * 1024
    lease_s: float = 30.0
    stall_timeout_s: float = 2.0
    data_port: int = 0
    tamper: str = ""
    """What the sender's network does to one segment of each transfer: flip | drop | repeat | swap | epoch."""

    def layout(self) -> kv_pb2.KVLayout:
        return make_layout(
            model_fingerprint=self.fingerprint,
            num_layers=LAYERS,
            num_kv_heads=HEADS,
            head_dim=DIM,
            hash_block_tokens=16,
            block_size=self.block_size,
            dtype=self.dtype,
        )

    def identity(self) -> kv_pb2.WorkerIdentity:
        return kv_pb2.WorkerIdentity(worker_id=self.worker_id, incarnation=self.incarnation)


@dataclass(frozen=True)
class Job:
    """One request, as both sides are told of it."""

    request_id: str
    tokens: int
    attempt: int = 1
    cached: int = 0
    """Tokens that D has already."""
    chunk: int = 32
    layers_at_once: int = 2
    hold_after: int | None = None
    """P stops computing after so many chunks, until told to go on."""
    finished: bool = False
    timeout_s: float = 60.0
    sender_incarnation: int = 1
    receiver_incarnation: int = 1

    @property
    def key(self) -> TransferKey:
        return TransferKey(f"transfer-{self.request_id}", self.attempt)

    @property
    def name(self) -> str:
        return f"{self.request_id}/{self.attempt}"

    def kv(self) -> torch.Tensor:
        """[L, 2, K, T, D] float32: what the model would compute."""
        generator = torch.Generator().manual_seed(sum(self.request_id.encode()) + self.tokens)
        return torch.randn(LAYERS, 2, HEADS, self.tokens, DIM, generator=generator)
